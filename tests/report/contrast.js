// Every text of the page whose contrast with what is behind it is less than WCAG's 4.5 (large text: 3).
(() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  // Whatever notation a colour is in, the canvas makes bytes of it.
  const bytes = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ancestors = (element) => (element ? [...ancestors(element.parentElement), element] : []);
  // In a drawing, the boxes on which a text stands.
  const boxes = (element) => {
    const drawing = element.closest("svg.curve");
    if (!drawing) return [];
    const { left, right, top, bottom } = element.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    return [...drawing.querySelectorAll("rect")].filter((box) => {
      const place = box.getBoundingClientRect();
      return place.left <= x && x <= place.right && place.top <= y && y <= place.bottom;
    }).map((box) => {
      const { fill, opacity } = getComputedStyle(box);
      const colour = bytes(fill);
      return [...colour.slice(0, 3), colour[3] * opacity];
    });
  };
  const faint = [];
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    const hidden = !element.getBoundingClientRect().width || style.visibility === "hidden" || style.clipPath.includes("inset");
    if (!text || hidden || ["SCRIPT", "STYLE", "TITLE", "OPTION"].includes(element.tagName) || element.closest(":disabled")) continue;
    const way = ancestors(element);
    const page = way.map((one) => bytes(getComputedStyle(one).backgroundColor)).reduce((behind, one) => over(one, behind), [255, 255, 255, 1]);
    const back = boxes(element).reduce((behind, one) => over(one, behind), page);
    const colour = bytes(element.ownerSVGElement ? style.fill : style.color);
    colour[3] *= way.reduce((product, one) => product * getComputedStyle(one).opacity, 1);
    const [light, dark] = [luminance(over(colour, back)), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 30)} (${element.tagName}): ${ratio.toFixed(2)}`);
  }
  return faint;
})()
