// The drawing of prompts in three dimensions: turned, filtered and asked. What is drawn, and where in
// the unit cube, the drawing says itself: it is the picture's, too.
const scatter = byId("scatter");
if (scatter) {
  const points = data.scatter;
  const plot = scatter.querySelector("svg");
  const [turn0, tilt0, edge] = plot.dataset.view.split(" ").map(Number);
  const tops = plot.dataset.tops.split(" ").map(Number);
  const centre = [plot.viewBox.baseVal.width / 2, 240];
  const START = { turn: turn0, tilt: tilt0, zoom: 1 };
  const view = { ...START };
  const precisions = Object.keys(data.precisions).filter((name) => points.row.some((row) => get("precision", row) === name));
  const shown = new Set(precisions);
  const group = byId("scatter-group");
  const batch = byId("scatter-batch");
  const groupOf = (row) => `${get("model", row)} · ${get("device", row)}`;
  const batchOf = (row) => String(get("batch_size", row) ?? get("batch", row));
  const used = [...new Set(points.row)];
  const offer = (select, values) => {
    values.forEach((name) => select.append(make("option", {}, name)));
    select.parentElement.hidden = values.length < 2;
  };
  offer(group, [...new Set(used.map(groupOf))].sort());
  offer(batch, [...new Set(used.map(batchOf))].sort((a, b) => a - b));

  const numbers = (text) => text.split(" ").map(Number);
  const walls = [...plot.querySelectorAll("[data-wall]")].map((path) => {
    const [axis, side] = numbers(path.dataset.wall);
    const middle = [0, 1, 2].map((other) => (other === axis ? side : 0.5));
    return { path, middle, ends: path.dataset.ends.split(";").map(numbers) };
  });
  const texts = [...plot.querySelectorAll("[data-at]")].map((text) => ({ text, at: numbers(text.dataset.at), off: Number(text.dataset.off) }));
  const marks = [...plot.querySelectorAll("[data-precision]")].map((path) => [path, path.dataset.precision]);
  const cube = points.row.map((_, i) => [(points.input[i] + points.output[i]) / tops[0], points.output[i] / tops[1], points.latency[i] / tops[2]]);

  let chosen = [];
  let placed = [];
  const choose = () => {
    chosen = [];
    for (let i = 0; i < points.row.length; i += 1) {
      const row = points.row[i];
      const fits = (!group.value || groupOf(row) === group.value) && (!batch.value || batchOf(row) === batch.value);
      if (fits && shown.has(get("precision", row))) chosen.push(i);
    }
    const part = points.row.length < points.total
      ? `A random ${points.row.length.toLocaleString("en-US")} of ${points.total.toLocaleString("en-US")} prompts, the slowest among them; `
      : "";
    byId("scatter-note").textContent = `${part}${chosen.length.toLocaleString("en-US")} shown.`;
    draw();
  };

  const camera = () => {
    const [ct, st, cp, sp] = [Math.cos(view.turn), Math.sin(view.turn), Math.cos(view.tilt), Math.sin(view.tilt)];
    const scale = edge * view.zoom;
    return ([x, y, z]) => {
      const [a, b, c] = [x - 0.5, y - 0.5, z - 0.5];
      const v = -a * st + b * ct;
      return [centre[0] + (a * ct + b * st) * scale, centre[1] - (c * cp + v * sp) * scale, v * cp - c * sp];
    };
  };
  const tenth = (value) => value.toFixed(1);
  let asked = false;
  const draw = () => {
    if (!asked) { asked = true; requestAnimationFrame(paint); }
  };
  const paint = () => {
    asked = false;
    const at = camera();
    for (const { path, middle, ends } of walls) {
      const behind = at(middle)[2] > 0;
      path.toggleAttribute("display", false);
      if (!behind) { path.setAttribute("display", "none"); continue; }
      path.setAttribute("d", ends.map((line) => {
        const [a, b] = [at(line.slice(0, 3)), at(line.slice(3))];
        return `M${tenth(a[0])} ${tenth(a[1])}L${tenth(b[0])} ${tenth(b[1])}`;
      }).join(""));
    }
    for (const { text, at: place, off } of texts) {
      const [x, y] = at(place);
      const [dx, dy] = [x - centre[0], y - centre[1]];
      const away = Math.hypot(dx, dy) || 1;
      text.setAttribute("x", tenth(x + (off * dx) / away));
      text.setAttribute("y", tenth(y + (off * dy) / away + 4));
    }
    placed = chosen.map((i) => [...at(cube[i]), i]);
    for (const [path, name] of marks) {
      const shape = data.precisions[name];
      const mine = placed.filter((point) => get("precision", points.row[point[3]]) === name);
      path.setAttribute("d", mine.map((point) => `M${tenth(point[0])} ${tenth(point[1])}${shape}`).join(""));
    }
  };

  const nearest = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
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
  document.querySelectorAll("[data-turn]").forEach((button) => button.addEventListener("click", () => act[button.dataset.turn]()));
  const keys = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", "+": "in", "=": "in", "-": "out", Home: "reset", 0: "reset" };
  scatter.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act[keys[event.key]]();
  });

  const legend = byId("scatter-legend");
  for (const name of precisions) {
    const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    icon.setAttribute("viewBox", "-6 -6 12 12");
    icon.setAttribute("aria-hidden", "true");
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
    mark.setAttribute("d", `M0 0${data.precisions[name]}`);
    icon.append(mark);
    const button = make("button", { type: "button", class: `toggle p${data.styles[name]}`, "aria-pressed": "true" }, icon, name);
    button.addEventListener("click", () => {
      if (!shown.delete(name)) shown.add(name);
      button.setAttribute("aria-pressed", String(shown.has(name)));
      choose();
    });
    legend.append(button);
  }
  [group, batch].forEach((select) => select.addEventListener("change", choose));
  choose();
}
