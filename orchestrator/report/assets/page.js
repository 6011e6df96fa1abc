// The rows, by column, and how numbers are written.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MISSING = "–";
let showRow = () => {}; // unfolds a row of the table of all rows, once that is there
document.documentElement.classList.add("scripted");

function column(name) {
  const stored = data.columns[name];
  if (!stored) return () => null;
  return stored.d ? (row) => stored.d[stored.c[row]] : (row) => stored.v[row];
}
const columns = {
  label: (row) => {
    const [asked, found] = [get("batch", row), get("batch_size", row)];
    const size = /^\d+$/.test(asked) || found === null ? `b=${asked}` : `b=${found} (${asked})`;
    return [get("before", row), data.labels.precision && get("precision", row), data.labels.batch && size, get("after", row)].filter(Boolean).join(" ");
  },
};
function get(name, row) {
  return (columns[name] ??= column(name))(row);
}
function distinct(name) {
  if (name === "label") return Array.from({ length: data.count }, (_, row) => get(name, row));
  const stored = data.columns[name];
  return stored && stored.d ? stored.d.filter((value) => value !== "") : [];
}

function digits(value, count = 4) {
  if (value === null || value === undefined) return MISSING;
  if (value === 0) return "0";
  const rounded = Math.abs(Number(value.toPrecision(count)));
  const places = Math.max(0, Math.min(9, count - 1 - Math.floor(Math.log10(rounded))));
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
function seconds(value) {
  if (value === null || value === undefined) return MISSING;
  if (value === 0) return "0 s";
  if (value < 0.9995e-3) return `${digits(value * 1e6, 3)} µs`;
  if (value < 0.9995) return `${digits(value * 1e3, 3)} ms`;
  if (value < 59.95) return `${digits(value, 3)} s`;
  const whole = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}
function size(value) {
  if (value === null || value === undefined) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1023.5 && unit < 4) { value /= 1024; unit += 1; }
  return unit ? `${digits(value, 3)} ${units[unit]}` : `${value} B`;
}
function moment(value) {
  if (value === null || value === undefined) return MISSING;
  return new Date(value * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}
function plusMinus(row) {
  const [value, low, high] = ["throughput", "low", "high"].map((name) => get(name, row));
  if (!value || low === null || high === null) return "";
  return `±${digits(((high - low) / 2 / value) * 100, 2)}%`;
}
function throughput(row) {
  const value = get("throughput", row);
  return value === null ? MISSING : `${rate(row)} ${get("unit", row)} ${plusMinus(row)}`.trim();
}
// A lower bound says so: others used the row's processors.
function rate(row) {
  return `${get("at_least", row) ? "≥ " : ""}${digits(get("throughput", row))}`;
}

// Every text goes in as text: nothing from the rows is ever parsed as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

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
// What a drawing's marks say of their row, or of themselves, and the way to that row.
function rowFacts(row) {
  if (get("state", row) !== "SUCCEEDED") return [get("state", row), get("reason", row)];
  const lines = [throughput(row)];
  if (get("tpot50", row) !== null) lines.push(`${seconds(get("tpot50", row))} an output token`);
  if (get("memory", row) !== null) lines.push(`${size(get("memory", row))} ${get("memory_kind", row)} memory`);
  return lines;
}
for (const figures of document.querySelectorAll("#tables, #timeline")) {
  figures.addEventListener("click", (event) => {
    const mark = event.target.closest("[data-row]");
    if (mark) showRow(Number(mark.dataset.row));
  });
  figures.addEventListener("pointermove", (event) => {
    const mark = event.target.closest("[data-row], [data-tip]");
    if (!mark) return hideTip();
    const { row, tip } = mark.dataset;
    const lines = [row && jobLine(Number(row)), ...(tip ? [tip] : rowFacts(Number(row)))];
    return showTip(event, lines.filter(Boolean).join("\n"));
  });
  figures.addEventListener("pointerleave", hideTip);
}
