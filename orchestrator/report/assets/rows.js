// All rows: sort, filter, page, unfold. Only the rows of one page are in the document.
const PAGE_ROWS = 50;
const oneUnit = distinct("unit").length === 1 ? distinct("unit")[0] : "";
const FIELDS = [
  { key: "state", title: "State" },
  { key: "label", title: "Job", wide: true },
  { key: "device", title: "Device", wide: true, telling: true },
  { key: "batch", title: "Batch", number: "batch_size", text: (row) => (get("batch", row) === "max" && get("batch_size", row) !== null ? `max = ${get("batch_size", row)}` : get("batch", row)) },
  { key: "throughput", title: oneUnit ? `Throughput, ${oneUnit}` : "Throughput", number: "throughput", text: (row) => (oneUnit && get("throughput", row) !== null ? `${rate(row)} ${plusMinus(row)}` : throughput(row)) },
  { key: "ttft", title: "First token", number: "ttft", text: (row) => seconds(get("ttft", row)) },
  { key: "tpot", title: "Per token, p50", number: "tpot50", text: (row) => seconds(get("tpot50", row)) },
  { key: "latency", title: "Prompt, p50", number: "latency50", text: (row) => seconds(get("latency50", row)) },
  { key: "memory", title: "Peak memory", number: "memory", text: (row) => size(get("memory", row)) },
  { key: "load", title: "Load", number: "load", text: (row) => seconds(get("load", row)) },
  { key: "attempts", title: "Attempts", number: "attempts", text: (row) => String(get("attempts", row)) },
  { key: "duration", title: "Card time", number: "duration", text: (row) => seconds(get("duration", row)) },
  { key: "where", title: "Card" },
  { key: "reason", title: "Reason", wide: true },
];
const FACTS = [
  ["Job id", "job_id"], ["Job", "label"], ["Model", "model"], ["Device", "device"], ["Precision", "precision"], ["Batch size", "batch"], ["Experiment", "experiment"], ["Workload", "workload"], ["Dataset", "dataset"],
  ["Engine", "engine"], ["Isolation", "isolation"], ["Parameters", "parameters"], ["Cards", "cards"],
  ["Emulated", "emulated", flag], ["Random weights", "random", flag], ["Synthetic data", "synthetic", flag],
  ["Precision here means", "precision_detail"], ["Total tokens/s", "total_rate", digits],
  ["Flags", "flags"], ["Repeats timed", "repeats"], ["Stopped by", "stop_reason"],
  ["Per output token, p95", "tpot95", seconds], ["Per output token, p99", "tpot99", seconds],
  ["Latency of a prompt, p95", "latency95", seconds], ["Timed part", "measured", seconds],
  ["Energy of the timed part", "energy", (joules) => `${digits(joules)} J`], ["Mean power of its cards", "power", (watts) => `${digits(watts)} W`], ["Work per joule", "per_joule", digits], ["Energy read from", "energy_source"],
  ["Load time", "load", seconds], ["Compile time", "compile", seconds], ["Warm-up time", "warmup", seconds], ["Warm-up", "warm_up"],
  ["Weights", "weights", size], ["Parameters of the model", "parameter_count", (value) => value.toLocaleString("en-US")],
  ["Model was resident", "resident", flag], ["Jobs this worker ran before", "jobs_before"],
  ["Threads", "threads"], ["Niceness", "niceness"], ["Started", "started", moment], ["Failure class", "failure_class"],
  ["Driver", "driver"], ["Commit", "commit"], ["Versions", "versions"], ["Details", "details"], ["Log", "log"],
];
function flag(value) {
  return value ? "yes" : "no";
}

const rowsTable = byId("rows-table");
if (rowsTable) {
  // What is the same in every row would push what differs off a narrow screen.
  const least = (field) => (field.telling && data.count > 1 ? 2 : 1);
  const fields = FIELDS.filter((field) => (field.number ? data.columns[field.number] : distinct(field.key).length >= least(field)));
  const state = { sort: null, down: false, page: 0, open: new Set() };
  const form = byId("filters");
  const selects = ["state", "model", "device", "precision", "batch", "experiment"].filter((key) => distinct(key).length > 1);
  for (const key of selects) {
    const select = make("select", { name: key }, make("option", { value: "" }, `any ${key}`));
    distinct(key).slice().sort().forEach((value) => select.append(make("option", { value }, value)));
    byId("filter-selects").append(make("label", {}, make("span", { class: "sr" }, key), select));
  }
  const searched = ["label", "job_id", "experiment", "workload", "model", "dataset", "device", "parameters", "precision", "batch", "state", "reason", "flags", "where", "failure_class"];
  let haystack = null;
  let matching = [];

  const sortValue = (field) => (field.number ? (row) => get(field.number, row) : (row) => get(field.key, row));
  const match = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = selects.map((key) => [key, form.elements[key].value]).filter(([, value]) => value);
    if (words.length && !haystack) {
      haystack = Array.from({ length: data.count }, (_, row) => searched.map((key) => get(key, row) ?? "").join("\n").toLowerCase());
    }
    matching = [];
    for (let row = 0; row < data.count; row += 1) {
      if (wanted.every(([key, value]) => get(key, row) === value) && words.every((word) => haystack[row].includes(word))) matching.push(row);
    }
    if (state.sort) {
      const value = sortValue(state.sort);
      const sign = state.down ? -1 : 1;
      // Rows without the value stay last, whichever way one sorts.
      matching.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const [noX, noY] = [x === null || x === "", y === null || y === ""];
        if (noX || noY) return noX - noY || a - b;
        return (x < y ? -1 : x > y ? 1 : 0) * sign || a - b;
      });
    }
  };
  const cellOf = (field, row, index) => {
    if (index === 0) {
      const name = get("state", row);
      const button = make("button", { type: "button", class: "open", "aria-expanded": String(state.open.has(row)) }, name);
      return make("td", { class: `s-${name.toLowerCase()}` }, button);
    }
    const text = field.text ? field.text(row) : get(field.key, row) ?? "";
    return make("td", { class: field.number ? "n" : field.wide ? "wide" : null, title: field.wide && text ? text : null }, text);
  };
  const unfolded = (row) => {
    const facts = make("dl", { class: "facts" });
    for (const [name, key, format] of FACTS) {
      const value = get(key, row);
      if (value === null || value === undefined || value === "") continue;
      facts.append(make("div", {}, make("dt", {}, name), make("dd", {}, format ? format(value) : String(value))));
    }
    const inner = make("div", { class: "inner" }, facts);
    const reason = get("reason", row);
    if (reason) inner.prepend(make("p", { class: "reason" }, reason));
    const tail = get("tail", row);
    if (tail) inner.append(make("h4", {}, "End of the log"), make("pre", { tabindex: "0" }, tail));
    const outputs = get("outputs", row);
    if (outputs) {
      inner.append(make("h4", {}, get("random", row) ? "First outputs (random weights: they mean nothing)" : "First outputs"));
      outputs.split("\x1e").forEach((text) => inner.append(make("pre", { tabindex: "0" }, text || "(empty)")));
    }
    const image = document.querySelector(`.gallery img[data-job="${CSS.escape(get("job_id", row))}"]`);
    if (image) inner.append(make("h4", {}, "First image"), image.cloneNode());
    return make("tr", { class: "more" }, make("td", { colspan: fields.length }, inner));
  };
  const paint = () => {
    const pages = Math.max(1, Math.ceil(matching.length / PAGE_ROWS));
    state.page = Math.max(0, Math.min(pages - 1, state.page));
    const first = state.page * PAGE_ROWS;
    const body = [];
    for (const row of matching.slice(first, first + PAGE_ROWS)) {
      body.push(make("tr", { "data-row": row }, ...fields.map((field, index) => cellOf(field, row, index))));
      if (state.open.has(row)) body.push(unfolded(row));
    }
    rowsTable.tBodies[0].replaceChildren(...body);
    const count = (number) => number.toLocaleString("en-US");
    byId("rows-count").textContent = matching.length === data.count ? `${count(data.count)} ${data.count === 1 ? "row" : "rows"}` : `${count(matching.length)} of ${count(data.count)} rows`;
    byId("rows-page").textContent = matching.length ? `${count(first + 1)} to ${count(Math.min(matching.length, first + PAGE_ROWS))} of ${count(matching.length)}` : "no row matches";
    byId("rows-pages").hidden = pages === 1 && matching.length > 0;
    document.querySelectorAll("[data-page]").forEach((button) => {
      const back = button.dataset.page === "first" || button.dataset.page === "back";
      button.disabled = back ? state.page === 0 : state.page >= pages - 1;
    });
  };
  const refresh = () => { match(); paint(); };

  fields.forEach((field) => {
    const button = make("button", { type: "button" }, field.title);
    const head = make("th", { scope: "col", class: field.number ? "n" : null }, button);
    button.addEventListener("click", () => {
      state.down = state.sort === field ? !state.down : Boolean(field.number);
      state.sort = field;
      state.page = 0;
      rowsTable.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      refresh();
    });
    rowsTable.tHead.rows[0].append(head);
    if (field.key === "throughput") button.click(); // the fastest first
  });
  rowsTable.tBodies[0].addEventListener("click", (event) => {
    const line = event.target.closest("tr[data-row]");
    if (!line || String(getSelection())) return;
    const row = Number(line.dataset.row);
    if (!state.open.delete(row)) state.open.add(row);
    paint();
    rowsTable.querySelector(`tr[data-row="${row}"] .open`).focus({ preventScroll: true });
  });
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.page = 0; refresh(); }, 80);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("filter-clear").addEventListener("click", () => { form.reset(); state.page = 0; refresh(); });
  byId("rows-pages").addEventListener("click", (event) => {
    const steps = { first: -Infinity, back: -1, next: 1, last: Infinity };
    if (!(event.target.dataset.page in steps)) return;
    state.page += steps[event.target.dataset.page];
    if (!Number.isFinite(state.page)) state.page = state.page > 0 ? Math.ceil(matching.length / PAGE_ROWS) - 1 : 0;
    paint();
  });
  showRow = (row) => {
    form.reset();
    form.elements.text.value = get("job_id", row);
    state.open = new Set([row]);
    state.page = 0;
    refresh();
    byId("rows").scrollIntoView();
    rowsTable.querySelector(`tr[data-row="${row}"] .open`)?.focus({ preventScroll: true });
  };
  refresh();
}
