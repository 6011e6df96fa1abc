// Asks for the state every two seconds and changes what has changed. All text goes in as text.
"use strict";
const EVERY_MS = 2000;
const QUIET_AFTER_S = 10; // the driver writes every second
const byId = (id) => document.getElementById(id);
const STATES = ["SUCCEEDED", "OUT_OF_MEMORY", "PRUNED", "UNSUPPORTED", "FAILED", "TIMED_OUT", "LOST", "NOT_STARTED"];

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")} min`;
}
function left(status) {
  if (status.eta_low_s == null || status.eta_high_s == null) return duration(status.eta_s);
  return `${duration(status.eta_low_s)} to ${duration(status.eta_high_s)}`;
}
function number(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function element(tag, classes, text) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }
function setClass(node, classes) { if (node.className !== classes) node.className = classes; }
// Children with keys: those that stay are kept, so that nothing flickers and a selection survives.
function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const name = key(item, at);
    let child = old.get(name);
    if (child) old.delete(name);
    else { child = make(item); child.dataset.key = name; }
    update(child, item);
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] || null);
  });
  for (const gone of old.values()) gone.remove();
}

function key(state) {
  const status = state.status;
  const facts = [];
  if (status) {
    facts.push(["Jobs done", `${status.done.toLocaleString("en")} of ${status.total.toLocaleString("en")}`, ""]);
    facts.push(["Cards assigned", `${status.assigned} of ${status.cards.length}`, ""]);
    facts.push(["Duration", duration(status.at - status.started_at), ""]);
    if (!status.finished && status.eta_s) facts.push(["Time left, estimated", left(status), ""]);
    for (const rate of status.rates)
      facts.push([`Of finished jobs`, `${number(rate.per_s)} ${rate.unit}`, `while timed, ${plural(rate.jobs, "job")}`]);
    if (status.jobs_per_h) facts.push(["Pace", `${number(status.jobs_per_h)} jobs/h`, ""]);
    const power = status.cards.map((card) => card.power_w).filter((watts) => watts != null);
    if (power.length)
      facts.push(["Power", `${number(power.reduce((sum, watts) => sum + watts, 0))} W`, `of ${plural(power.length, "card")}`]);
  }
  keyed(byId("key"), facts, (fact) => fact[0] + fact[1].split(" ").slice(-1), () => {
    const box = element("div");
    box.append(element("dt"), element("dd"));
    return box;
  }, (box, [name, value, note]) => {
    setText(box.children[0], name);
    if (box.dataset.shown === value + note) return;
    box.dataset.shown = value + note;
    box.children[1].replaceChildren(value, ...(note ? [element("small", "", note)] : []));
  });
}

function states(state) {
  const known = STATES.filter((name) => state.states[name]);
  const shown = [...known, ...Object.keys(state.states).filter((name) => !known.includes(name))];
  const style = (name) => `s-${name.toLowerCase()}`;
  keyed(byId("states"), shown, (name) => name, (name) => element("i", style(name)), (bar, name) => {
    bar.style.flexGrow = state.states[name];
  });
  keyed(byId("legend"), shown, (name) => name, (name) => {
    const item = element("li");
    item.append(element("i", `key-box ${style(name)}`), element("b"), ` ${name}`);
    return item;
  }, (item, name) => setText(item.children[1], state.states[name].toLocaleString("en")));
}

function banners(state) {
  const notes = [];
  if (state.status && state.status.waiting) notes.push(["Waiting for cards", state.status.waiting]);
  if (state.status && state.status.paused) notes.push(["Paused: nothing new is started", state.status.paused]);
  if (state.status && state.status.trouble) notes.push(["Trouble; what runs goes on", state.status.trouble]);
  if (state.emulated) notes.push(["Emulated cards", "No number here is one of a real card."]);
  if (state.damaged) notes.push([`${plural(state.damaged, "file")} of this run could not be read`, "Their rows are missing here."]);
  if (state.reading) notes.push(["The rows of this run are still being read", "Those shown are not all."]);
  for (const text of state.trouble) notes.push(["Not all of the run could be read", text]);
  byId("banners").hidden = !notes.length;
  keyed(byId("banners"), notes, (note) => note.join(), ([head, text]) => {
    const note = element("p");
    note.append(element("b", "", head), `. ${text}`);
    return note;
  }, () => {});
}

function best(state) {
  const status = state.status;
  const all = status ? status.best : [];
  const flags = Object.entries(status ? status.flag_counts : {}).map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`);
  byId("best-section").hidden = !all.length && !flags.length;
  setText(byId("best-head"), status && status.finished ? "Best" : "Best so far");
  const again = status && status.repeats ? ` ${plural(status.repeats, "repeat")} of flagged rows and winners so far.` : "";
  setText(byId("flags"), flags.length ? `Rows with flags: ${flags.join(", ")}.${again}` : again.trim());
  keyed(byId("best"), all, (_, at) => String(at), () => {
    const item = element("li");
    item.append(element("p", "figure"), element("p", "job"), element("small"), element("p", "provisional"));
    return item;
  }, (item, one) => {
    const [figure, job, rows, provisional] = item.children;
    setText(figure, `${number(one.per_s)} ${one.unit}`);
    setText(job, one.job);
    setText(rows, `of ${plural(one.rows, "row")} with the same work`);
    setText(provisional, one.provisional ? `Provisional: ${one.provisional}` : "");
    setClass(item, one.provisional ? "open" : "");
  });
}

function answers(state) {
  const all = state.status ? state.status.answers : [];
  keyed(byId("answers"), all, (_, at) => String(at), () => {
    const item = element("li", "answer");
    item.append(element("b"), ": ", element("span"), element("small", "quiet"));
    return item;
  }, (item, answer) => {
    setText(item.children[0], answer.question);
    setText(item.children[1], answer.sentence);
    setText(item.children[2], ` ${answer.basis}`);
  });
}

function sensors(card) {
  const parts = [];
  if (card.power_w != null) parts.push(`${number(card.power_w)} W`);
  if (card.temperature_c != null) parts.push(`${Math.round(card.temperature_c)} °C`);
  if (card.utilization_percent != null) parts.push(`${Math.round(card.utilization_percent)}% utilization`);
  if (card.memory_used_bytes != null) parts.push(`${number(card.memory_used_bytes / 2 ** 30)} GiB`);
  return parts.join(" · ");
}

function cards(state) {
  const all = state.status && !state.status.finished ? state.status.cards : [];
  byId("cards-section").hidden = !all.length;
  const servers = new Map();
  for (const card of all) {
    const server = card.card.slice(0, card.card.lastIndexOf("/"));
    servers.set(server, [...(servers.get(server) || []), card]);
  }
  // What was said long ago has gone on since, or has ended: its age is not counted up.
  keyed(byId("cards"), [...servers], ([name]) => name, ([name]) => {
    const box = element("div", "server");
    const head = element("h3");
    head.append(name, element("small"));
    box.append(head, element("ul"));
    return box;
  }, (box, [, group]) => {
    setText(box.querySelector("small"), `${group.filter((card) => card.attempt_id).length} of ${group.length} assigned`);
    keyed(box.lastChild, group, (card) => card.card, () => {
      const item = element("li");
      const top = element("p", "top");
      top.append(element("b"), element("span"));
      item.append(top, element("p", "job"), element("p", "sensors"));
      return item;
    }, (item, card) => {
      setClass(item, `ph-${card.phase.replace(/[^a-z]/g, "")}`);
      const [top, job, reading] = item.children;
      setText(top.children[0], card.card.slice(card.card.lastIndexOf("/") + 1));
      setText(top.children[1], card.worker_id ? `${card.phase} ${duration(card.phase_age_s)}` : card.phase);
      setText(job, card.job);
      setText(reading, sensors(card));
    });
  });
}

function ago(at, now) { return at ? `${duration(now - at)} ago` : ""; }

function failures(state) {
  const status = state.status;
  const last = status ? status.failures : [];
  byId("failures-section").hidden = !last.length;
  const counts = Object.entries(status ? status.failure_counts : {}).map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`);
  setText(byId("failure-counts"), counts.length ? `Attempts by kind of failure: ${counts.join(", ")}.` : "");
  keyed(byId("failures"), last, (failure) => `${failure.at} ${failure.job}`, (failure) => {
    const item = element("li");
    const head = element("p");
    head.append(element("span", `state s-${failure.state.toLowerCase()}`, failure.state), " ", element("b", "", failure.job));
    const about = [failure.failure_class.replaceAll("_", " "), failure.card, failure.final ? "" : "is tried again"];
    item.append(head, element("p", "", failure.reason), element("small", "", about.filter(Boolean).join(" · ")), element("small"));
    return item;
  }, (item, failure) => setText(item.lastChild, ` · ${ago(failure.at, state.now)}`));
}

function rows(state) {
  byId("rows-section").hidden = !state.rows.length;
  const more = state.row_count > state.rows.length ? `, the newest ${state.rows.length} of them here` : "";
  setText(byId("row-count"), `${plural(state.row_count, "row")} so far${more}.`);
  const labels = ["Job", "State", "Throughput", "Where", "When"];
  keyed(byId("rows"), state.rows, (row) => `${row.at} ${row.job} ${row.state} ${row.where}`, (row) => {
    const line = element("tr", row.final ? "" : "retried");
    const job = element("th", "", row.job);
    job.scope = "row";
    const state = element("td");
    state.append(element("span", `state s-${row.state.toLowerCase()}`, row.state));
    if (!row.final) state.append(element("small", "", "not the last word on this job"));
    if (row.reason) { state.append(element("small", "", row.reason)); state.title = row.reason; }
    if (row.reason || !row.final) state.className = "why";
    const cell = (text, style) => element("td", text ? style : `${style} none`, text || "–");
    line.append(job, state, cell(row.figure, "n"), cell(row.where, ""), element("td"));
    [...line.children].forEach((cell, at) => { cell.dataset.label = labels[at]; });
    return line;
  }, (line, row) => setText(line.lastChild, ago(row.at, state.now)));
}

let last = null; // the last state, and when it came
let unreachable = false;

function heard() {
  const node = byId("heard");
  if (unreachable) {
    setClass(node, "quiet asof lost");
    const what = last ? ` What is shown is ${duration((performance.now() - last.came) / 1000)} old.` : "";
    setText(node, `nightgrid watch does not answer.${what}`);
    return;
  }
  const { status, silent_s: silent, stale } = last.state;
  if (!status || status.finished) { setClass(node, "quiet asof"); setText(node, ""); return; }
  setClass(node, stale ? "quiet asof lost" : silent > QUIET_AFTER_S ? "quiet asof old" : "quiet asof");
  setText(node, stale
    ? "Its driver may be dead, or cannot reach this storage. The same nightgrid run command resumes the run."
    : silent > QUIET_AFTER_S ? `No word from the driver for ${duration(silent)}.` : "The driver is there.");
}

function show(state) {
  document.title = state.status ? `${state.status.done}/${state.status.total} ${state.run} · Nightgrid watch` : `${state.run} · Nightgrid watch`;
  setText(byId("run"), state.run);
  setText(byId("sentence"), state.sentence);
  setClass(byId("sentence"), state.stale ? "verdict open" : "verdict");
  byId("progress").hidden = !state.status;
  if (state.status) { byId("progress").max = state.status.total || 1; byId("progress").value = state.status.done; }
  byId("report").hidden = !state.report;
  key(state); states(state); answers(state); banners(state); best(state); cards(state); failures(state); rows(state);
}

let timer = 0;
async function ask() {
  clearTimeout(timer);
  const state = await fetched();
  unreachable = state === null;
  if (state !== null) {
    last = { state, came: performance.now() };
    show(state);
  }
  heard();
  if (!document.hidden) timer = setTimeout(ask, EVERY_MS); // a hidden page asks when it is seen again
}
async function fetched() {
  try {
    const answer = await fetch("state", { signal: AbortSignal.timeout(15000) });
    return answer.ok ? await answer.json() : null;
  } catch { // the server is gone, or its answer was cut short
    return null;
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
ask();
