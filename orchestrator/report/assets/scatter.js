// Three-dimensional scatter of prompts: total length, output length, latency. Orthographic, so
// that equal lengths look equal wherever they are.
const scatter = byId("scatter");
if (scatter) {
  const points = data.scatter;
  const START = { turn: -0.62, tilt: 0.42, zoom: 1 };
  const view = { ...START };
  const precisions = data.precisions.filter((name) => distinct("precision").includes(name));
  const shown = new Set(precisions);
  const group = byId("scatter-group");
  const groupOf = (row) => `${get("model", row)} · ${get("device", row)}`;
  const used = new Set(points.row);
  const groups = [...new Set([...used].map(groupOf))].sort();
  groups.forEach((name) => group.append(make("option", {}, name)));
  const paths = SHAPES.map((shape) => new Path2D(shape));

  let chosen = [];
  let limits = null;
  let placed = [];
  const axis = (top) => {
    const raw = Math.max(top, 1e-9) / 4.2;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    return { top: step * Math.ceil(top / step - 1e-9), step };
  };
  const choose = () => {
    chosen = [];
    let [total, output, latency] = [0, 0, 0];
    for (let i = 0; i < points.row.length; i += 1) {
      const row = points.row[i];
      if (group.value && groupOf(row) !== group.value) continue;
      total = Math.max(total, points.input[i] + points.output[i]);
      output = Math.max(output, points.output[i]);
      latency = Math.max(latency, points.latency[i]);
      if (shown.has(get("precision", row))) chosen.push(i);
    }
    limits = { total: axis(total), output: axis(output), latency: axis(latency) };
    const part = points.row.length < points.total
      ? `A random ${points.row.length.toLocaleString("en-US")} of ${points.total.toLocaleString("en-US")} prompts, the slowest among them; `
      : "";
    byId("scatter-note").textContent = points.total
      ? `${part}${chosen.length.toLocaleString("en-US")} shown.`
      : "No row kept its prompts.";
    fillTable();
    draw();
  };

  // A point of the unit cube on the screen: x and y in pixels, depth towards the reader.
  const camera = (width, height) => {
    const scale = Math.min(width * 0.52, height * 0.6) * view.zoom;
    const [ct, st, cp, sp] = [Math.cos(view.turn), Math.sin(view.turn), Math.cos(view.tilt), Math.sin(view.tilt)];
    return (x, y, z) => {
      const [a, b, c] = [x - 0.5, y - 0.5, z - 0.5];
      const u = a * ct + b * st;
      const v = -a * st + b * ct;
      return [width / 2 + u * scale * 1.05, height / 2 - 6 - (c * cp + v * sp) * scale, v * cp - c * sp];
    };
  };
  const draw = stage(scatter, (pen, width, height) => {
    const at = camera(width, height);
    const ink = colour("--soft");
    const line = colour("--line");
    const segment = (a, b, style, thick = 1) => {
      pen.strokeStyle = style;
      pen.lineWidth = thick;
      pen.beginPath();
      pen.moveTo(...at(...a));
      pen.lineTo(...at(...b));
      pen.stroke();
    };
    // Walls that lie behind the points: chosen by where the eye is.
    const farX = Math.sin(view.turn) > 0 ? 0 : 1;
    const farY = Math.cos(view.turn) > 0 ? 1 : 0;
    const floor = view.tilt >= 0 ? 0 : 1;
    const ticks = (limit) => Array.from({ length: Math.round(limit.top / limit.step) + 1 }, (_, i) => [i * limit.step, (i * limit.step) / limit.top]);
    for (const [, t] of ticks(limits.total)) { segment([t, 0, floor], [t, 1, floor], line); segment([t, farY, 0], [t, farY, 1], line); }
    for (const [, t] of ticks(limits.output)) { segment([0, t, floor], [1, t, floor], line); segment([farX, t, 0], [farX, t, 1], line); }
    for (const [, t] of ticks(limits.latency)) { segment([0, farY, t], [1, farY, t], line); segment([farX, 0, t], [farX, 1, t], line); }

    // Axes on the edges nearest to the reader, with their ticks outside.
    const nearX = 1 - farX;
    const nearY = 1 - farY;
    const outward = (from, to, distance) => {
      const middle = at(...from.map((value, i) => (value + to[i]) / 2));
      const inside = at(0.5, 0.5, from[2] === to[2] ? from[2] : 0.5);
      const [dx, dy] = [middle[0] - inside[0], middle[1] - inside[1]];
      const length = Math.hypot(dx, dy) || 1;
      return [(dx / length) * distance, (dy / length) * distance];
    };
    const edge = (from, to, limit, name, format, far) => {
      segment(from, to, colour("--strong"), 1.2);
      const [dx, dy] = outward(from, to, 20);
      const [nx, ny] = outward(from, to, far);
      pen.fillStyle = ink;
      pen.textBaseline = "middle";
      pen.textAlign = "center";
      for (const [value, t] of ticks(limit)) {
        if (from[2] !== to[2] && t === floor) continue; // a figure of the level axes stands there
        const [x, y] = at(...from.map((start, i) => start + (to[i] - start) * t));
        pen.fillText(format(value), x + dx, y + dy);
      }
      const [ax, ay] = at(...from);
      const [bx, by] = at(...to);
      let angle = Math.atan2(by - ay, bx - ax);
      if (angle > Math.PI / 2 + 0.01) angle -= Math.PI;
      if (angle < -Math.PI / 2 - 0.01) angle += Math.PI;
      pen.save();
      pen.translate((ax + bx) / 2 + nx, (ay + by) / 2 + ny);
      pen.rotate(angle);
      pen.fillText(name, 0, 0);
      pen.restore();
    };
    const plain = (value) => digits(value, 3).replace(/\.0+$/, "");
    edge([0, nearY, floor], [1, nearY, floor], limits.total, "input + output, tokens", plain, 44);
    edge([nearX, 0, floor], [nearX, 1, floor], limits.output, "output, tokens", plain, 44);
    // The upright axis stands at the silhouette's left.
    const corners = [[0, 0], [0, 1], [1, 0], [1, 1]].sort((a, b) => at(...a, 0.5)[0] - at(...b, 0.5)[0]);
    edge([...corners[0], 0], [...corners[0], 1], limits.latency, "latency, s", (value) => String(+value.toPrecision(3)), 52);

    const colours = Array.from({ length: SHAPES.length }, (_, i) => colour(`--p${i}`));
    placed = chosen.map((i) => {
      const x = (points.input[i] + points.output[i]) / limits.total.top;
      return [...at(x, points.output[i] / limits.output.top, points.latency[i] / limits.latency.top), i];
    });
    placed.sort((a, b) => b[2] - a[2]);
    pen.lineWidth = 0.8;
    const many = placed.length > 1500;
    for (const [x, y, depth, i] of placed) {
      const style = precisionStyle(get("precision", points.row[i]));
      pen.globalAlpha = Math.max(0.25, Math.min(1, (many ? 0.62 : 0.85) - depth * 0.35));
      pen.fillStyle = colours[style];
      pen.save();
      pen.translate(x, y);
      const scale = (many ? 0.62 : 0.95) * Math.sqrt(view.zoom);
      pen.scale(scale, scale);
      pen.fill(paths[style]);
      pen.restore();
    }
    pen.globalAlpha = 1;
  });

  const nearest = (event) => {
    const box = scatter.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let distance = 100;
    for (const point of placed) {
      const d = (point[0] - x) ** 2 + (point[1] - y) ** 2;
      if (d <= distance) { distance = d; best = point; }
    }
    return best && best[3];
  };
  const limit = (value, low, high) => Math.max(low, Math.min(high, value));
  const turn = (dx, dy) => {
    view.turn += dx;
    view.tilt = limit(view.tilt + dy, -1.5, 1.5);
    draw();
  };
  const zoom = (factor) => {
    view.zoom = limit(view.zoom * factor, 0.5, 8);
    draw();
  };
  const act = {
    left: () => turn(-0.12, 0), right: () => turn(0.12, 0), up: () => turn(0, 0.1), down: () => turn(0, -0.1),
    in: () => zoom(1.2), out: () => zoom(1 / 1.2), reset: () => { Object.assign(view, START); draw(); },
  };
  const held = new Map();
  scatter.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event);
    scatter.setPointerCapture(event.pointerId);
    scatter.classList.add("held");
    hideTip();
  });
  scatter.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) {
      const i = nearest(event);
      if (i === null) return hideTip();
      const row = points.row[i];
      return showTip(event, `${jobLine(row)}\n${points.input[i]} input + ${points.output[i]} output tokens\n${seconds(points.latency[i])}`);
    }
    if (held.size === 2) {
      const other = [...held.entries()].find(([id]) => id !== event.pointerId)[1];
      const span = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
      zoom(span(event) / Math.max(1, span(before)));
    } else {
      turn((event.clientX - before.clientX) * 0.008, (event.clientY - before.clientY) * 0.008);
    }
    return held.set(event.pointerId, event);
  });
  const release = (event) => {
    held.delete(event.pointerId);
    if (!held.size) scatter.classList.remove("held");
  };
  ["pointerup", "pointercancel"].forEach((name) => scatter.addEventListener(name, release));
  scatter.addEventListener("pointerleave", hideTip);
  scatter.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300));
  }, { passive: false });
  scatter.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", "+": "in", "=": "in", "-": "out", Home: "reset", 0: "reset" };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act[keys[event.key]]();
    scatter.dataset.view = JSON.stringify(view);
  });
  document.querySelectorAll("[data-turn]").forEach((button) => button.addEventListener("click", () => act[button.dataset.turn]()));

  const legend = byId("scatter-legend");
  for (const name of precisions) {
    const style = precisionStyle(name);
    const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    icon.setAttribute("viewBox", "-6 -6 12 12");
    icon.setAttribute("aria-hidden", "true");
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
    mark.setAttribute("d", `M0 0${SHAPES[style]}`);
    icon.append(mark);
    const button = make("button", { type: "button", class: `toggle p${style}`, "aria-pressed": "true" }, icon, name);
    button.addEventListener("click", () => {
      if (!shown.delete(name)) shown.add(name);
      button.setAttribute("aria-pressed", String(shown.has(name)));
      choose();
    });
    legend.append(button);
  }
  group.addEventListener("change", choose);

  function fillTable() {
    const body = byId("scatter-table").tBodies[0];
    body.replaceChildren();
    const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
    for (const name of precisions) {
      const mine = chosen.filter((i) => get("precision", points.row[i]) === name);
      if (!mine.length) continue;
      const told = (values, format) => {
        values.sort((a, b) => a - b);
        return `${format(quantile(values, 0.5))} (${format(quantile(values, 0.05))} to ${format(quantile(values, 0.95))})`;
      };
      const latencies = mine.map((i) => points.latency[i]);
      body.append(make("tr", {},
        make("th", { scope: "row" }, name),
        make("td", {}, mine.length.toLocaleString("en-US")),
        make("td", {}, told(mine.map((i) => points.input[i] + points.output[i]), String)),
        make("td", {}, told(mine.map((i) => points.output[i]), String)),
        make("td", {}, told(latencies, seconds)),
        make("td", {}, seconds(latencies[latencies.length - 1]))));
    }
  }
  choose();
}
