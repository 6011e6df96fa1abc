"""The pieces of the embedded model's tokenizer: a fixed list, in ChatGLM3's order.

``<unk>``, ``<s>``, ``</s>``, the 256 bytes, then words of Chinese clothing adverts and a few
English ones (what AdvertiseGen and short prompts are made of), printable ASCII, full-width
punctuation and the 3755 everyday Chinese characters of GB 2312 level 1. Everything else falls back
to bytes. Nothing is trained, so the ids are the same for everyone, for good; a change here must
raise ``tiny_chatglm3.RECIPE``.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import SPECIAL_TOKENS, Sizes
from workloads.models.chatglm3.tokenizer import Piece, write_tokenizer
from workloads.models.embedded import RawUniform

if TYPE_CHECKING:
    import torch

# Names and values of AdvertiseGen's attributes, and what adverts say about them.
_ADVERT = """
类型 版型 材质 颜色 风格 图案 裙型 裙长 裙腰型 裙下摆 裙袖长 裙领型 裙款式 衣样式 衣长 衣袖长
衣领型 衣袖型 衣门襟 衣款式 裤型 裤长 裤腰型 裤款式 裤口 上衣 裙子 裤子 连衣裙 半身裙 衬衫 毛衣
外套 风衣 针织衫 卫衣 西装 大衣 羽绒服 牛仔裤 阔腿裤 短裤 长裤 背带裤 T恤 马甲 皮衣 棉衣 雪纺衫
宽松 修身 显瘦 直筒 收腰 高腰 中腰 低腰 松紧腰 系带 纯棉 棉麻 羊毛 雪纺 蕾丝 真丝 牛仔 针织 皮革
亚麻 网纱 丝绒 涤纶 羊绒 黑色 白色 红色 蓝色 绿色 粉色 黄色 灰色 紫色 米色 卡其色 酒红色 藏青色
纯色 复古 简约 休闲 甜美 清新 优雅 时尚 性感 潮流 文艺 通勤 运动 民族风 欧美 韩版 街头 学院 百搭
青春 淑女 英伦 碎花 条纹 格子 印花 波点 刺绣 字母 卡通 拼接 撞色 渐变 几何 豹纹 亮片 短裙 中长裙
长裙 百褶裙 包臀裙 鱼尾裙 蛋糕裙 吊带裙 A字裙 不规则 荷叶边 木耳边 开叉 流苏 短袖 长袖 无袖 七分袖
五分袖 喇叭袖 泡泡袖 灯笼袖 蝙蝠袖 落肩袖 圆领 V领 方领 立领 翻领 高领 一字领 衬衫领 娃娃领 西装领
半高领 连帽 口袋 纽扣 拉链 蝴蝶结 腰带 褶皱 镂空 露肩 露背 绑带 抽绳 螺纹 单排扣 双排扣 套头 开衫
常规款 短款 中长款 长款 九分裤 七分裤 采用 选用 搭配 设计 面料 舒适 柔软 透气 亲肤 细腻 光滑 轻盈
质感 垂坠感 弹性 保暖 厚实 轻薄 耐磨 剪裁 裁剪 版式 线条 身材 身形 腰线 腿型 肌肤 比例 曲线 气质
魅力 个性 活力 层次感 立体感 视觉 效果 细节 元素 点缀 装饰 工艺 精致 精美 经典 独特 新颖 大方 随性
自然 浪漫 俏皮 可爱 温柔 知性 干练 帅气 展现 凸显 打造 彰显 勾勒 修饰 遮肉 显高 拉长 带来 给人
穿着 上身 日常 出街 约会 夏天 春夏 秋冬 冬季 春季 女性 女孩 整体 十足 满满 不失 更加 非常 同时
这款 这件 这条 一款 一件 一条 让你 使得 具有 以及 而且 轻松 驾驭 穿出 女神 范儿 少女 感觉 味道
气息 时髦 高级
"""
ADVERT_WORDS = tuple(_ADVERT.split())

_ENGLISH = """
the a of to and in is that it for on with as was at by this be from or an are not have you what
how why which write explain list give name some about your can do does make one two three should
would when where who
"""
ENGLISH_WORDS = tuple(_ENGLISH.split())

_PUNCTUATION = "，。！？、；：“”‘’（）《》【】—…·～￥％＋－＝０１２３４５６７８９"


def pieces() -> list[Piece]:
    """All pieces, in id order; scores fall with the id, as SentencePiece writes them."""
    return list(_listed())


@cache
def _listed() -> tuple[Piece, ...]:
    """The pieces, made once: a plan asks for their number with every job."""
    listed = [
        Piece(text="<unk>", score=0.0, kind="unknown"),
        Piece(text="<s>", score=0.0, kind="control"),
        Piece(text="</s>", score=0.0, kind="control"),
        *(Piece(text=f"<0x{byte:02X}>", score=0.0, kind="byte") for byte in range(256)),
    ]
    normal = dict.fromkeys(_words()) | dict.fromkeys(_characters())
    listed += [
        Piece(text=text, score=-float(rank), kind="normal") for rank, text in enumerate(normal)
    ]
    return tuple(listed)


def _words() -> list[str]:
    """Words, each after its own beginnings: a merge needs both its halves to be pieces."""
    words = [*ADVERT_WORDS, *(f"▁{word}" for word in ENGLISH_WORDS)]
    return [word[:end] for word in words for end in range(2, len(word) + 1)]


def _characters() -> list[str]:
    ascii_printable = [chr(code) for code in range(0x21, 0x7F)]
    rows, cells = range(0xB0, 0xD8), range(0xA1, 0xFF)
    codes = [bytes((row, cell)) for row in rows for cell in cells]
    level_one = [c.decode("gb2312") for c in codes if not (c[0] == 0xD7 and c[1] > 0xF9)]
    return ["▁", *ascii_printable, *_PUNCTUATION, *level_one]


# The embedded model: ChatGLM3's architecture at 1/2000 of its size, so that all runs offline.
#
# Multi-query attention with two key/value heads, half-rotary heads, bias on queries, keys and
# values, SwiGLU, an output layer of its own. **Its weights are random**: it costs what such a model
# costs and says nothing sensible. Two arrangements make its greedy texts useful for measuring:
#
# * Rows of the output layer for advert words are full size, other pieces a quarter, special tokens
#   zero, so texts are strings of advert words and never a stray role token.
# * The rows of ``</s>`` and ``<|user|>``, where a ChatGLM3 text ends, are enlarged by ``END_GAIN``,
#   so that a few per cent of steps end the text and lengths vary with the prompt, as a real model's
#   do. Over 64 advert prompts: 3 to 128 tokens and more, 50 on average, a seventh beyond 128.
#
# The best logit leads the second by 0.25 standard deviations of the logits in the median and by
# 2.6e-4 at the least of 3200 steps; batching moves logits by 3e-6. So greedy texts are the same
# batched and single.
#
# Every weight is one byte of PCG64's raw stream (whose values numpy guarantees, unlike those of its
# distributions) times a scale, rounded to bfloat16, in which the checkpoint is stored: the same
# bits on every machine, and fp32 and bf16 runs start from equal values.

NAME = "tiny-chatglm3"
#: Raise when anything changes that changes the model or its tokenizer: it is in the cache's key.
RECIPE = 1
SEED = 4  # of the first eight, the one whose texts vary most in length
SIZES = Sizes(
    hidden=192,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=32,
    intermediate=384,
    vocabulary=4672,
)
MAX_POSITIONS = 8192
END_GAIN = 1.4


def cache_key() -> str:
    """The key of the built model in the cache."""
    return f"{NAME}-v{RECIPE}"


def config() -> dict[str, Any]:
    """The model's config.json."""
    return layout.native_config(
        SIZES, eos_token_ids=end_token_ids(), max_positions=MAX_POSITIONS
    ) | {"random_weights": True}


def end_token_ids() -> list[int]:
    """``</s>``, ``<|user|>`` and ``<|observation|>``, as in ChatGLM3."""
    first = len(pieces())
    return [layout.END_ID] + [
        first + SPECIAL_TOKENS.index(token) for token in ("<|user|>", "<|observation|>")
    ]


def build(directory: Path) -> None:
    """Write config, generation config, tokenizer and weights into an empty directory."""
    from safetensors.torch import save_file

    generation = {
        "bos_token_id": layout.BEGIN_ID,
        "eos_token_id": end_token_ids(),
        "pad_token_id": layout.UNKNOWN_ID,
    }
    for name, content in (("config.json", config()), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory, pieces(), MAX_POSITIONS)
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})


def weights() -> dict[str, torch.Tensor]:
    """All tensors in bfloat16, by their native names."""
    import torch

    random = RawUniform(SEED)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in native_shapes().items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        elif name.endswith("bias"):
            tensor = random.tensor(shape, deviation=0.1)
        elif name == "model.embed_tokens.weight":
            tensor = random.tensor(shape, deviation=1.0)
        else:
            tensor = random.tensor(shape, deviation=1 / math.sqrt(shape[1]))
        if name == "lm_head.weight":
            tensor *= _head_gains()[:, None]
        tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Every native tensor's name and shape, in a fixed order."""
    return layout.native_shapes(SIZES)


def _head_gains() -> torch.Tensor:
    """The size of each row of the output layer, [vocabulary]."""
    import torch

    listed = pieces()
    words = {*ADVERT_WORDS, "，", "。"}
    gains = torch.zeros(SIZES.vocabulary)
    for index, piece in enumerate(listed):
        if piece.kind == "normal":
            gains[index] = 1.0 if piece.text in words else 0.25
    for end in end_token_ids()[:2]:
        gains[end] = END_GAIN
    return gains
