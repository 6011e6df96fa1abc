// One tooltip for all figures. It repeats what the tables say, so nothing depends on it.
const tip = byId("tip");
function showTip(event, text) {
  if (!text) return hideTip();
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const above = event.clientY + 18 + height > innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above ? event.clientY - height - 12 : event.clientY + 18}px`;
}
function hideTip() {
  tip.hidden = true;
}
function jobLine(row) {
  return `${get("label", row)} · ${get("device", row)}`;
}
// The buttons and keys of a figure, each of which names an action.
function steer(figure, attribute, act, arrows) {
  const keys = { ...arrows, "+": "in", "=": "in", "-": "out", Home: "reset", 0: "reset" };
  document.querySelectorAll(`[data-${attribute}]`).forEach((button) => button.addEventListener("click", () => act[button.dataset[attribute]]()));
  figure.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act[keys[event.key]]();
  });
}
