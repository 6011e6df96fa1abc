// What each card did, over time. Windows of several invocations are laid end to end: the hours
// between two nights are left out, and a dashed line says so.
const timeline = byId("timeline");
if (timeline) {
  const { windows, lanes, origin } = data.timeline;
  const spans = data.timeline;
  const states = Object.keys(data.states);
  const GAP = 0.012;
  const wall = windows.reduce((sum, [start, end]) => sum + end - start, 0) || 1;
  const spread = 1 - GAP * (windows.length - 1);
  const offsets = [];
  windows.reduce((from, [start, end]) => { offsets.push(from); return from + ((end - start) / wall) * spread + GAP; }, 0);
  const place = (time) => {
    let w = 0;
    while (w + 1 < windows.length && time >= windows[w + 1][0]) w += 1;
    return offsets[w] + ((time - windows[w][0]) / wall) * spread;
  };
  const view = { from: 0, to: 1 };
  const row = lanes.length > 64 ? 9 : lanes.length > 24 ? 15 : 20;
  const HEAD = 30;
  const nodeGap = 8;
  const tops = [];
  let y = HEAD;
  lanes.forEach((lane, i) => {
    if (i && lanes[i - 1].node !== lane.node) y += nodeGap;
    tops.push(y);
    y += row;
  });
  timeline.style.height = `${y + 12}px`;
  const edges = (width) => ({ left: width < 520 ? 92 : 132, right: width - (width < 520 ? 44 : 62) });
  const xs = spans.start.map((start, i) => [place(start), place(spans.end[i])]);
  let drawnWidth = 0;

  const draw = stage(timeline, (pen, width) => {
    drawnWidth = width;
    const { left, right } = edges(width);
    const scale = (right - left) / (view.to - view.from);
    const at = (x) => left + (x - view.from) * scale;
    const [ink, soft, line, sunk] = ["--ink", "--soft", "--line", "--sunk"].map(colour);
    const paints = states.map((state) => colour(STATE_COLOURS[state]));
    pen.textBaseline = "middle";
    // Time since the start of each window.
    const visible = (view.to - view.from) * wall;
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400]
      .find((s) => s >= visible / Math.max(2, (right - left) / 95)) || 172800;
    windows.forEach(([start, end], w) => {
      pen.textAlign = width < 520 ? "left" : "center";
      for (let t = 0; t <= end - start; t += step) {
        const x = at(offsets[w] + (t / wall) * spread);
        if (x < left - 1 || x > right + 1) continue;
        pen.strokeStyle = line;
        pen.beginPath(); pen.moveTo(x, HEAD - 6); pen.lineTo(x, y + 2); pen.stroke();
        pen.fillStyle = soft;
        const pad = (n) => String(n).padStart(2, "0");
        if (width < 520 && x + 54 > width - 56) continue; // there stands "assigned"
        pen.fillText(step < 60 ? `${Math.floor(t / 60)}:${pad(t % 60)} min` : `${Math.floor(t / 3600)}:${pad(Math.floor((t % 3600) / 60))} h`, x, 13);
      }
      if (w) {
        const x = at(offsets[w] - GAP / 2);
        if (x > left && x < right) {
          pen.setLineDash([4, 4]); pen.strokeStyle = soft;
          pen.beginPath(); pen.moveTo(x, 22); pen.lineTo(x, y + 2); pen.stroke();
          pen.setLineDash([]);
        }
      }
    });
    lanes.forEach((lane, i) => {
      pen.fillStyle = sunk;
      pen.fillRect(left, tops[i] + 1, right - left, row - 2);
    });
    pen.save();
    pen.beginPath(); pen.rect(left, HEAD - 4, right - left, y); pen.clip();
    for (let i = 0; i < xs.length; i += 1) {
      const [a, b] = [at(xs[i][0]), at(xs[i][1])];
      if (b < left || a > right) continue;
      pen.globalAlpha = spans.probe[i] ? 0.5 : 0.92;
      pen.fillStyle = paints[spans.state[i]];
      const top = tops[spans.lane[i]] + 1;
      const wide = b - a > 3 ? b - a - 1 : Math.max(0.7, b - a);
      pen.fillRect(a, top, wide, row - 2);
      if (row >= 15 && wide > 58) {
        const job = spans.row[i];
        if (job >= 0) {
          const text = `${get("precision", job)} ${get("batch", job) === "max" ? "max" : `b${get("batch", job)}`}`;
          pen.globalAlpha = 1;
          if (pen.measureText(text).width < wide - 8) {
            pen.fillStyle = colour("--surface");
            pen.textAlign = "left";
            pen.fillText(text, Math.max(a, left) + 5, top + (row - 2) / 2 + 0.5);
          }
        }
      }
    }
    pen.restore();
    pen.globalAlpha = 1;
    lanes.forEach((lane, i) => {
      const middle = tops[i] + row / 2;
      const first = !i || lanes[i - 1].node !== lane.node;
      pen.textAlign = "left";
      if (first) {
        pen.fillStyle = ink;
        let name = lane.node;
        while (name.length > 1 && pen.measureText(name).width > left - 36) name = name.slice(0, -2) + "…";
        pen.fillText(name, 10, middle);
      }
      if (row >= 15 || first) {
        pen.fillStyle = soft;
        pen.textAlign = "right";
        pen.fillText(String(lane.card), left - 8, middle);
      }
      if (row >= 15) {
        pen.fillStyle = soft;
        pen.textAlign = "right";
        pen.fillText(`${Math.round((100 * lane.assigned) / (lane.assigned + lane.unassigned || 1))}%`, width - 10, middle);
      }
    });
    pen.fillStyle = soft;
    pen.textAlign = "right";
    pen.fillText("assigned", width - 10, 13);
    pen.textAlign = "left";
    if (width >= 520) pen.fillText("node, card", 10, 13);
  });

  const clampView = () => {
    const span = Math.min(1, Math.max(view.to - view.from, 1e-4));
    view.from = Math.max(0, Math.min(1 - span, view.from));
    view.to = view.from + span;
    draw();
  };
  const zoom = (factor, around = (view.from + view.to) / 2) => {
    view.from = around - (around - view.from) * factor;
    view.to = around + (view.to - around) * factor;
    clampView();
  };
  const move = (share) => {
    const span = view.to - view.from;
    view.from += share * span;
    view.to += share * span;
    clampView();
  };
  const act = { left: () => move(-0.2), right: () => move(0.2), in: () => zoom(0.6), out: () => zoom(1 / 0.6), reset: () => { view.from = 0; view.to = 1; draw(); } };
  document.querySelectorAll("[data-move]").forEach((button) => button.addEventListener("click", () => act[button.dataset.move]()));
  timeline.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "reset", 0: "reset" };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act[keys[event.key]]();
  });
  const under = (event) => {
    const box = timeline.getBoundingClientRect();
    const { left, right } = edges(drawnWidth);
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px < left || px > right) return null;
    const x = view.from + ((px - left) / (right - left)) * (view.to - view.from);
    const lane = tops.findIndex((top) => py >= top && py < top + row);
    const slack = ((view.to - view.from) / (right - left)) * 2;
    let best = null;
    for (let i = 0; i < xs.length; i += 1) {
      if (spans.lane[i] === lane && x >= xs[i][0] - slack && x <= xs[i][1] + slack) best = i;
    }
    return best;
  };
  let grip = null;
  timeline.addEventListener("pointerdown", (event) => {
    grip = { x: event.clientX, moved: false };
    timeline.setPointerCapture(event.pointerId);
    hideTip();
  });
  timeline.addEventListener("pointermove", (event) => {
    if (grip) {
      const { left, right } = edges(drawnWidth);
      if (Math.abs(event.clientX - grip.x) > 3) { grip.moved = true; timeline.classList.add("held"); }
      if (grip.moved) { move((grip.x - event.clientX) / (right - left)); grip.x = event.clientX; }
      return;
    }
    const i = under(event);
    timeline.style.cursor = i === null ? "" : "pointer";
    if (i === null) { hideTip(); return; }
    const job = spans.row[i];
    const lane = lanes[spans.lane[i]];
    const many = spans.jobs && spans.jobs[i] > 1;
    const name = many ? `${spans.jobs[i].toLocaleString("en-US")} jobs, one after the other` : job >= 0 ? jobLine(job) : spans.jobs ? "one job" : "a job without a final row";
    const kind = spans.probe[i] ? "probe" : `attempt ${spans.attempt[i]}`;
    showTip(event, `${name}\n${states[spans.state[i]]}${many ? "" : `, ${kind}`}\n${lane.node}/${lane.kind}${lane.card}: ${moment(origin + spans.start[i])}, ${seconds(spans.end[i] - spans.start[i])}`);
  });
  timeline.addEventListener("pointerup", (event) => {
    const i = grip && !grip.moved ? under(event) : null;
    grip = null;
    timeline.classList.remove("held");
    if (i !== null && spans.row[i] >= 0) showRow(spans.row[i]);
  });
  timeline.addEventListener("pointercancel", () => { grip = null; timeline.classList.remove("held"); });
  timeline.addEventListener("pointerleave", hideTip);
  timeline.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = timeline.getBoundingClientRect();
    const { left, right } = edges(drawnWidth);
    const x = view.from + ((event.clientX - box.left - left) / (right - left)) * (view.to - view.from);
    zoom(Math.exp(event.deltaY / 300), x);
  }, { passive: false });

  const seen = new Set(spans.state);
  const legend = byId("timeline-legend");
  states.forEach((state, code) => {
    if (!seen.has(code)) return;
    legend.append(make("span", {}, make("i", { class: `key-box s-${state.toLowerCase()}`, "aria-hidden": "true" }), state));
  });
  if (spans.jobs) legend.append(make("span", {}, "jobs of a moment that ended alike are drawn as one"));
  if (spans.probe.some(Boolean)) legend.append(make("span", {}, "pale: probe for the largest batch"));
}
