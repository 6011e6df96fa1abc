// The drawing of cards over time: moved, zoomed and asked. The drawing itself is the picture's, too.
const timeline = byId("timeline");
if (timeline) {
  const { windows, lanes, origin } = data.timeline;
  const spans = data.timeline;
  const states = Object.keys(data.states);
  const plot = timeline.querySelector(".spans");
  const { width: whole, height: tall } = plot.viewBox.baseVal;
  const start = plot.x.baseVal.value;
  const indices = new Map([...plot.querySelectorAll("rect")].map((rect, i) => [rect, i]));
  const ticks = [...timeline.querySelectorAll(".time")].map((tick) => ({ tick, text: tick.textContent, share: (tick.x.baseVal[0].value - start) / whole }));
  const view = { from: 0, to: 1 };

  const clock = (s) => `${Math.floor(s / 60)}:${(s % 60).toFixed(view.to - view.from < 0.05 ? 1 : 0).padStart(2, "0")} min`;
  const draw = () => {
    const span = Math.min(1, Math.max(view.to - view.from, 1e-4));
    view.from = Math.max(0, Math.min(1 - span, view.from));
    view.to = view.from + span;
    plot.setAttribute("viewBox", `${view.from * whole} 0 ${span * whole} ${tall}`);
    timeline.classList.toggle("zoomed", span < 1);
    for (const { tick, text, share } of ticks) {
      tick.textContent = span < 1 ? clock((view.from + share * span) * (windows[0][1] - windows[0][0])) : text;
    }
  };
  const zoom = (factor, around = (view.from + view.to) / 2) => {
    view.from = around - (around - view.from) * factor;
    view.to = around + (view.to - around) * factor;
    draw();
  };
  const move = (share) => {
    const span = view.to - view.from;
    view.from += share * span;
    view.to += share * span;
    draw();
  };
  const act = { left: () => move(-0.2), right: () => move(0.2), in: () => zoom(0.6), out: () => zoom(1 / 0.6), reset: () => { view.from = 0; view.to = 1; draw(); } };
  const wide = () => plot.getBoundingClientRect().width;
  steer(timeline, "move", act, { ArrowLeft: "left", ArrowRight: "right" }, (factor, event) => {
    const share = (event.clientX - plot.getBoundingClientRect().left) / wide();
    zoom(1 / factor, view.from + share * (view.to - view.from));
  });

  const told = (i) => {
    const job = spans.row[i];
    const lane = lanes[spans.lane[i]];
    const many = spans.jobs && spans.jobs[i] > 1;
    const name = many ? `${spans.jobs[i].toLocaleString("en-US")} jobs, one after the other` : job >= 0 ? jobLine(job) : spans.jobs ? "one job" : "a job without a final row";
    const kind = spans.probe[i] ? "probe" : `attempt ${spans.attempt[i]}`;
    return `${name}\n${states[spans.state[i]]}${many ? "" : `, ${kind}`}\n${lane.node}/${lane.kind}${lane.card}: ${moment(origin + spans.start[i])}, ${seconds(spans.end[i] - spans.start[i])}`;
  };
  let grip = null;
  timeline.addEventListener("pointerdown", (event) => {
    grip = { x: event.clientX, moved: false, on: indices.get(event.target) };
    timeline.setPointerCapture(event.pointerId);
    hideTip();
  });
  timeline.addEventListener("pointermove", (event) => {
    if (grip) {
      if (Math.abs(event.clientX - grip.x) > 3) { grip.moved = true; timeline.classList.add("held"); }
      if (grip.moved) { move((grip.x - event.clientX) / wide()); grip.x = event.clientX; }
      return;
    }
    const i = indices.get(event.target);
    if (i === undefined) hideTip();
    else showTip(event, told(i));
  });
  const release = () => { grip = null; timeline.classList.remove("held"); };
  timeline.addEventListener("pointerup", () => {
    const row = grip && !grip.moved && grip.on !== undefined ? spans.row[grip.on] : -1;
    release();
    if (row >= 0) showRow(row);
  });
  timeline.addEventListener("pointercancel", release);

  const notes = [];
  if (spans.jobs) notes.push("Jobs of a moment that ended alike are drawn as one.");
  if (spans.probe.some(Boolean)) notes.push("Pale: probe for the largest batch.");
  byId("timeline-note").textContent = notes.join(" ");
}
