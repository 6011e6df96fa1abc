"""A synthetic twin of AdvertiseGen: the same shape and lengths, every word made up here.

AdvertiseGen pairs the attributes of a garment (``类型#裤*版型#宽松*风格#性感``) with a Chinese
advertisement. It may not be shipped, so this module makes sets like it from word lists and
sentence patterns: about nine attributes, 20 to 130 characters of input, 50 to 250 of output,
with the right-skewed lengths that such text has. Lengths drive cost; the prose does not matter,
and nobody should judge a model's quality on it. Each example depends on its seed and position
alone, so a longer set begins with the shorter one, on every machine.
"""

from __future__ import annotations

import math
from random import Random

from workloads.data.examples import Example

DEFAULT_SEED = 20260101

_GARMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "裤": {
        "裤长": ("九分裤", "长裤", "七分裤", "短裤"),
        "裤型": ("阔腿裤", "直筒裤", "小脚裤", "哈伦裤", "背带裤", "喇叭裤"),
        "裤腰型": ("高腰", "中腰", "松紧腰"),
        "裤款式": ("拉链", "口袋", "抽绳", "纽扣", "破洞", "不规则"),
        "裤口": ("卷边", "毛边", "开衩", "收口"),
    },
    "裙": {
        "裙长": ("长裙", "中长裙", "半身裙", "短裙"),
        "裙型": ("百褶裙", "鱼尾裙", "蛋糕裙", "直筒裙", "大裙摆", "a字裙"),
        "裙下摆": ("荷叶边", "压褶", "花边", "波浪边"),
        "裙腰型": ("高腰", "自然腰", "松紧腰"),
        "裙领型": ("圆领", "v领", "方领", "翻领", "一字领"),
        "裙袖长": ("长袖", "短袖", "无袖", "五分袖"),
        "裙袖型": ("泡泡袖", "喇叭袖", "灯笼袖", "飞飞袖"),
        "裙款式": ("拼接", "腰带", "系带", "露背", "吊带", "勾花镂空"),
    },
    "上衣": {
        "衣样式": ("衬衫", "卫衣", "外套", "风衣", "毛衣", "西装", "针织衫"),
        "衣长": ("短款", "常规", "中长款"),
        "衣领型": ("圆领", "v领", "立领", "翻领", "连帽", "娃娃领"),
        "衣袖长": ("长袖", "短袖", "七分袖"),
        "衣袖型": ("落肩袖", "灯笼袖", "插肩袖", "蝙蝠袖"),
        "衣门襟": ("单排扣", "双排扣", "拉链", "套头"),
        "衣款式": ("口袋", "系带", "罗纹", "亮片", "不对称", "绑带"),
    },
}
_COMMON: dict[str, tuple[str, ...]] = {
    "版型": ("宽松", "显瘦", "修身", "直筒", "立体剪裁"),
    "材质": ("棉", "牛仔布", "雪纺", "针织", "蕾丝", "羊毛", "真丝", "亚麻"),
    "颜色": ("黑色", "白色", "粉色", "蓝色", "焦糖色", "姜黄色", "纯色", "黑白"),
    "风格": ("简约", "复古", "休闲", "文艺", "性感", "清新", "英伦", "青春", "街头", "通勤"),
    "图案": ("条纹", "格子", "印花", "刺绣", "碎花", "波点", "字母", "线条"),
    "工艺": ("水洗", "拼接", "染色", "钉珠"),
}
_OPENINGS = (
    "这一款{color}的{garment}走的是{style}路线，第一眼看上去就让人觉得舒服。",
    "想要一件百搭又不挑人的{garment}，不妨看看这款{style}风的设计。",
    "{style}的{garment}总能轻松穿出自己的味道，日常出门不用多想。",
    "换季的时候，衣橱里很需要一件这样的{garment}。",
    "设计师在这款{garment}上花了不少心思，{style}之中带着一点俏皮。",
)
_MIDDLES = (
    "采用{cut}的版型，对身材没有太多要求，微胖的女生也可以放心。",
    "选用柔软的{fabric}面料，贴身穿着很亲肤，透气也不闷热。",
    "{pattern}的点缀让整体不再单调，近看更有细节。",
    "{detail}的设计恰到好处，走动起来很有层次感。",
    "{color}耐看又显白，和深色浅色都能搭得很好。",
    "再加上{detail}的小心思，拉长了身体的比例，显得高挑。",
    "细密的走线平整结实，洗过很多次也不容易变形。",
    "做工精细，边角处理得干净利落，看得出用心。",
    "{fabric}的质感挺括有型，久坐之后也不会留下明显的褶皱。",
    "把{pattern}放在醒目的位置，年轻有活力，很减龄。",
    "收放自如的线条修饰了小缺点，把优点都留在外面。",
    "里面留出了足够的空间，搭一件薄打底也不会臃肿。",
)
_CLOSINGS = (
    "搭配一双小白鞋，就是轻松的周末造型。",
    "上班或约会都合适，值得拥有。",
    "简单搭配，也能成为人群里的亮点。",
    "无论是逛街还是旅行，穿上它都自在。",
    "{season}穿刚刚好，快把它带回家吧。",
)
_SEASONS = ("春天", "夏天", "秋天", "冬天")


def synthetic_examples(count: int, seed: int = DEFAULT_SEED) -> list[Example]:
    """``count`` made-up examples, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_example(Random(seed * 1_000_003 + index)) for index in range(count)]


def pick(random: Random, values: tuple[str, ...]) -> str:
    """One of them, by one draw."""
    # Random.random() is the one method whose sequence Python guarantees across versions.
    return values[int(random.random() * len(values))]


def normal(random: Random) -> float:
    """About normally distributed, with mean 0 and deviation 1."""
    return sum(random.random() for _ in range(12)) - 6.0


def _example(random: Random) -> Example:
    garment = pick(random, tuple(_GARMENTS))
    attributes = _attributes(random, garment)
    content = "*".join(f"{key}#{value}" for key, value in attributes)
    return Example(
        content=content, summary=_advertisement(random, garment, attributes), synthetic=True
    )


def _attributes(random: Random, garment: str) -> list[tuple[str, str]]:
    """The kind of garment, then attributes in random order; a key may come twice, as in the
    real set."""
    wanted = min(20, max(4, round(9.2 * math.exp(0.32 * normal(random)))))
    pool = [(key, value) for key, values in _COMMON.items() for value in values]
    pool += [(key, value) for key, values in _GARMENTS[garment].items() for value in values]
    chosen: list[tuple[str, str]] = [("类型", garment)]
    counts: dict[str, int] = {}
    while len(chosen) < wanted:
        key, value = pool.pop(int(random.random() * len(pool)))
        if counts.get(key, 0) < 2:
            counts[key] = counts.get(key, 0) + 1
            chosen.append((key, value))
    return chosen


def _advertisement(random: Random, garment: str, attributes: list[tuple[str, str]]) -> str:
    """Sentences about the attributes until a log-normal length is reached (median about 115)."""
    target = min(225.0, max(50.0, 100.0 * math.exp(0.36 * normal(random))))
    given = dict(attributes)
    details = tuple(value for key, value in attributes[1:] if key not in _COMMON)
    words = {
        "garment": next((v for k, v in attributes if k in ("裤型", "裙型", "衣样式")), garment),
        "color": given.get("颜色", "百搭颜色"),
        "style": given.get("风格", "简约"),
        "cut": given.get("版型", "合身"),
        "fabric": given.get("材质", "优质"),
        "pattern": given.get("图案", "纯色"),
        "season": pick(random, _SEASONS),
    }
    middles = list(_MIDDLES)
    text = pick(random, _OPENINGS).format(**words)
    closing = pick(random, _CLOSINGS).format(**words)
    while len(text) + len(closing) < target and middles:
        sentence = middles.pop(int(random.random() * len(middles)))
        text += sentence.format(**words, detail=pick(random, details) if details else "收腰")
    return text + closing
