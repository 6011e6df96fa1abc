// Finding a table among many, and the way from a cell to its row.
const finder = byId("find-table");
if (finder) {
  const tables = [...document.querySelectorAll("#tables details.table")];
  const texts = tables.map((table) => table.querySelector("summary").textContent.toLowerCase());
  const say = byId("found-tables");
  const all = byId("all-tables");
  const FIRST = 20; // a list of hundreds is searched, not read
  const find = () => {
    const words = finder.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    tables.forEach((table, index) => {
      const fits = words.every((word) => texts[index].includes(word));
      found += fits;
      table.hidden = !fits || (found > FIRST && !all.disabled);
    });
    const seen = all.disabled ? found : Math.min(found, FIRST);
    say.textContent = `${seen} of ${found === tables.length ? "" : `${found} found among `}${tables.length} tables`;
  };
  all.addEventListener("click", () => { all.disabled = true; find(); });
  finder.addEventListener("input", find);
  find();
}

const matrices = byId("tables");
if (matrices) {
  matrices.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-row]");
    if (cell) showRow(Number(cell.dataset.row));
  });
  matrices.addEventListener("pointermove", (event) => {
    const cell = event.target.closest("[data-row]");
    if (!cell) return hideTip();
    const row = Number(cell.dataset.row);
    const lines = [jobLine(row)];
    if (get("state", row) === "SUCCEEDED") {
      lines.push(throughput(row));
      if (get("tpot50", row) !== null) lines.push(`${seconds(get("tpot50", row))} an output token`);
      if (get("memory", row) !== null) lines.push(`${size(get("memory", row))} ${get("memory_kind", row)} memory`);
    } else {
      lines.push(get("state", row), get("reason", row));
    }
    return showTip(event, lines.filter(Boolean).join("\n"));
  });
  matrices.addEventListener("pointerleave", hideTip);
}
