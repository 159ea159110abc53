"use strict";
(() => {
// Everything that comes from a model is set as text, never as markup.
const facts = JSON.parse(document.getElementById("facts").textContent);

for (const row of facts.collectives) {
  row.causes = row.causes.map(([value, maker, user]) => ({ value, maker: facts.sides[maker], user: facts.sides[user] }));
  row.alternative = facts.alternatives[row.alternative];
}

const $ = (id) => document.getElementById(id);
function make(tag, options = {}, ...children) {
  const { text, cls, ...attributes } = options;
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const precise = (x) => (x === 0 ? "0" : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(3)).toString());
function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${precise(n)} ${units[i]}`;
}
function timeText(us) {
  if (Math.abs(us) >= 1e6) return `${precise(us / 1e6)} s`;
  if (Math.abs(us) >= 1e3) return `${precise(us / 1e3)} ms`;
  return `${precise(us)} us`;
}
const signed = (us) => (us < 0 ? "\u2212" : "+") + timeText(Math.abs(us));
const pattern = (name) => name.replace(/(^|[.])\d+(?=$|[.])/g, "$1*");
const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axes = facts.mesh.map((axis) => axis.axis);
const kindOf = Object.fromEntries(facts.mesh.map((axis) => [axis.axis, axis.kind]));
const colour = (lane, phase) => (lane === "compute" ? `--${phase}` : `--axis${axes.indexOf(lane) % 4}`);

// ---- theme

const themeButton = $("theme");
function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  themeButton.textContent = dark ? "Light" : "Dark";
  redraw();
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
themeButton.addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
let before = false;
addEventListener("beforeprint", () => { before = document.documentElement.classList.contains("dark"); setTheme(false); });
addEventListener("afterprint", () => setTheme(before));

// ---- tables that sort, filter and group

function table(place, { columns, rows, group, more, noun, sort }) {
  const search = make("input", { type: "search", placeholder: `Filter ${noun}`, "aria-label": `Filter ${noun}` });
  const tools = make("div", { cls: "tools" }, search);
  const count = make("span", { cls: "count" });
  const grouped = make("input", { type: "checkbox" });
  const groups = group ? grouping(rows, group, columns) : rows;
  if (groups.length < rows.length) {
    grouped.checked = true;
    tools.append(make("label", {}, grouped, "repeated layers together"));
  }
  tools.append(count);
  const body = make("tbody");
  const head = make("tr");
  let [by, down] = sort || [null, false];
  columns.forEach((column, i) => {
    const button = make("button", { type: "button", text: column.title });
    const cell = make("th", { cls: column.num ? "num" : "" }, button);
    button.addEventListener("click", () => {
      down = by === i ? !down : Boolean(column.num);
      by = i;
      draw();
    });
    head.append(cell);
  });
  const shown = () => {
    const all = grouped.checked ? groups : rows;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = words.length ? all.filter((row) => words.every((word) => textOf(row, columns).includes(word))) : all;
    if (by === null) return kept;
    const key = (row) => (columns[by].sort || columns[by].value)(row);
    const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return [...kept].sort((a, b) => (down ? -1 : 1) * order(key(a), key(b)));
  };
  function draw() {
    [...head.children].forEach((cell, i) => cell.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
    const found = shown();
    body.replaceChildren();
    count.textContent = `${found.length.toLocaleString("en")} of ${(grouped.checked ? groups : rows).length.toLocaleString("en")} ${grouped.checked ? "kinds of " : ""}${noun}`;
    append(found, 0);
  }
  function append(found, from) {
    const until = Math.min(found.length, from + 400);
    for (const row of found.slice(from, until)) body.append(line(row));
    if (until === found.length) return;
    const button = make("button", { type: "button", text: `${(found.length - until).toLocaleString("en")} more` });
    const last = make("tr", {}, make("td", { colspan: columns.length }, button));
    button.addEventListener("click", () => { last.remove(); append(found, until); });
    body.append(last);
  }
  function line(row) {
    const made = make("tr", { cls: "row" });
    for (const column of columns) {
      const cell = make("td", { cls: column.num ? "num" : column.cls || "" });
      const value = column.show ? column.show(row) : column.value(row);
      cell.append(value instanceof Node ? value : String(value));
      made.append(cell);
    }
    if (more) {
      made.classList.add("open");
      made.tabIndex = 0;
      const toggle = () => {
        const next = made.nextElementSibling;
        if (next && next.classList.contains("more")) next.remove();
        else made.after(make("tr", { cls: "more" }, make("td", { colspan: columns.length }, ...more(row))));
      };
      made.addEventListener("click", toggle);
      made.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
    }
    return made;
  }
  search.addEventListener("input", draw);
  grouped.addEventListener("change", draw);
  if (rows.length > 8) place.append(tools);
  place.append(make("div", { cls: "scroll" }, make("table", {}, make("thead", {}, head), body)));
  draw();
}
function textOf(row, columns) {
  if (row.text === undefined) {
    const cells = columns.map((column) => (column.text ? column.text(row) : String(column.value(row))));
    row.text = [...cells, ...(row.members || [row]).map((member) => member.module || member.name || "")].join(" ").toLowerCase();
  }
  return row.text;
}
function grouping(rows, key, columns) {
  const found = new Map();
  for (const row of rows) {
    const name = key(row);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(row);
  }
  const sums = columns.filter((column) => column.sum).map((column) => column.sum);
  return [...found.values()].map((members) => {
    if (members.length === 1) return members[0];
    const together = { ...members[0], members, times: members.length, text: undefined };
    for (const name of sums) together[name] = sum(members, name);
    together.module = pattern(members[0].module || "");
    return together;
  });
}
const times = (row) => (row.times ? `${row.times} \u00d7 ` : "");

// ---- mesh

table($("mesh-table"), {
  noun: "axes",
  rows: facts.mesh,
  columns: [
    { title: "Axis", value: (r) => r.axis, cls: "mono" },
    { title: "Ranks", value: (r) => r.size, num: true },
    { title: "Plan", value: (r) => r.kind, cls: "mono" },
    { title: "What it does", value: (r) => r.does },
    { title: "Parameters in shards", value: (r) => r.sharded, num: true },
    { title: "Collectives", value: (r) => r.collectives, num: true },
    { title: "Sent by a rank", value: (r) => r.bytes, show: (r) => bytesText(r.bytes), num: true },
    { title: "Time", value: (r) => r.time, show: (r) => timeText(r.time), num: true },
    { title: "Exposed", value: (r) => r.exposed, show: (r) => exposedText(r.exposed), num: true },
  ],
});
function exposedText(us) {
  if (us <= 0.05) return make("span", { cls: "soft", text: "hidden" });
  return make("span", { cls: us > 0.02 * facts.time.step ? "exposed" : "", text: timeText(us) });
}

// ---- memory

const parts = Object.entries(facts.memory.parts).filter(([, size]) => size);
function memoryBar() {
  const whole = Math.max(facts.memory.peak, facts.memory.limit || 0) || 1;
  $("memory-bar").replaceChildren(...parts.map(([name, size]) => {
    const part = make("i", { title: `${name.replace("_", " ")} ${bytesText(size)}` });
    part.style.width = `${(100 * size) / whole}%`;
    part.style.background = `var(--${name})`;
    return part;
  }));
  $("memory-legend").replaceChildren(...parts.map(([name, size]) => {
    const entry = make("span", { text: `${name.replace("_", " ")} ${bytesText(size)}` });
    entry.style.setProperty("--of", `var(--${name})`);
    return entry;
  }));
}
const NS = "http://www.w3.org/2000/svg";
function draw(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function steps(limit, count, base) {
  const raw = limit / count;
  const power = base === 2 ? 2 ** Math.floor(Math.log2(raw)) : 10 ** Math.floor(Math.log10(raw));
  const step = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map((k) => k * power).find((s) => s >= raw) || raw;
  return Array.from({ length: Math.floor(limit / step) + 1 }, (_, i) => i * step);
}
function memoryCurve() {
  const W = 1180, H = 250, L = 70, R = 14, T = 14, B = 26;
  const { at, activations, temporaries } = facts.curve;
  const fixed = facts.memory.peak - facts.memory.parts.activations - facts.memory.parts.temporaries;
  const { limit } = facts.memory;
  const highest = Math.max(facts.memory.peak, limit && limit < 3 * facts.memory.peak ? limit : 0) * 1.06 || 1;
  const x = (us) => L + ((W - L - R) * us) / (facts.time.step || 1);
  const y = (size) => H - B - ((H - T - B) * size) / highest;
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Memory of a rank over a step" });
  for (const tick of steps(highest, 4, 2)) {
    svg.append(draw("line", { x1: L, x2: W - R, y1: y(tick), y2: y(tick), stroke: css("--line") }));
    svg.append(draw("text", { x: L - 8, y: y(tick) + 4, "text-anchor": "end" }, bytesText(tick)));
  }
  for (const tick of steps(facts.time.step || 1, 8, 10)) {
    svg.append(draw("text", { x: x(tick), y: H - 8, "text-anchor": "middle" }, timeText(tick)));
  }
  const area = (low, high, name) => {
    const points = at.map((us, i) => `${x(us).toFixed(1)},${y(high(i)).toFixed(1)}`);
    const back = at.map((us, i) => `${x(us).toFixed(1)},${y(low(i)).toFixed(1)}`).reverse();
    svg.append(draw("polygon", { points: [...points, ...back].join(" "), fill: css(`--${name}`), "fill-opacity": 0.9 }));
  };
  area(() => 0, () => fixed, "parameters");
  area(() => fixed, (i) => fixed + activations[i], "activations");
  area((i) => fixed + activations[i], (i) => fixed + activations[i] + temporaries[i], "temporaries");
  if (limit && limit <= highest) {
    svg.append(draw("line", { x1: L, x2: W - R, y1: y(limit), y2: y(limit), stroke: css("--bad"), "stroke-dasharray": "6 4", "stroke-width": 1.5 }));
    const label = draw("text", { x: W - R - 4, y: y(limit) - 5, "text-anchor": "end" }, `limit ${bytesText(limit)}`);
    label.style.fill = css("--bad");
    svg.append(label);
  }
  const top = at.map((_, i) => activations[i] + temporaries[i]).reduce((best, v, i, all) => (v > all[best] ? i : best), 0);
  if (at.length) {
    svg.append(draw("circle", { cx: x(at[top]), cy: y(facts.memory.peak), r: 3.5, fill: css("--ink") }));
    const left = x(at[top]) > W / 2;
    svg.append(draw("text", { x: x(at[top]) + (left ? -8 : 8), y: y(facts.memory.peak) + 4, "text-anchor": left ? "end" : "start" }, `peak ${bytesText(facts.memory.peak)}`));
  }
  $("memory-curve").replaceChildren(svg);
}
if (facts.memory.largest.length) {
  table($("largest"), {
    noun: "values",
    rows: facts.memory.largest,
    columns: [
      { title: "Held at the peak", value: (r) => r.value, cls: "mono name" },
      { title: "Size", value: (r) => r.bytes, show: (r) => bytesText(r.bytes), num: true },
      { title: "Kind", value: (r) => r.kind },
      { title: "Type", value: (r) => r.type, cls: "mono" },
      { title: "Made by", value: (r) => r.op, cls: "mono" },
      { title: "Module", value: (r) => r.module, cls: "mono name" },
      { title: "Line", value: (r) => r.source, cls: "mono" },
    ],
  });
}

// ---- calls, as columns of numbers and strings

const C = facts.calls;
const N = C.name.length;
const S = facts.strings;
const call = (i) => ({
  name: C.name[i], op: S[C.op[i]], arguments: C.arguments[i], type: S[C.type[i]], layout: S[C.layout[i]],
  source: S[C.source[i]], module: S[C.module[i]], phase: S[C.phase[i]], lane: S[C.lane[i]], start: C.start[i], time: C.time[i],
});

// ---- timeline

const canvas = $("timeline-canvas");
const lanes = ["compute", ...axes];
const view = { from: 0, to: facts.time.step || 1 };
const ROW = 30, GAP = 8, LEFT = 90, AXIS = 22;
function timeline() {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = lanes.length * (ROW + GAP) + AXIS;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  g.textBaseline = "middle";
  const scale = (width - LEFT) / (view.to - view.from);
  lanes.forEach((lane, row) => {
    g.fillStyle = css("--hover");
    g.fillRect(LEFT, row * (ROW + GAP), width - LEFT, ROW);
    g.fillStyle = css("--soft");
    g.fillText(lane === "compute" ? "compute" : `over ${lane}`, 0, row * (ROW + GAP) + ROW / 2);
  });
  const colours = new Map();
  const rowOf = new Map(lanes.map((lane, row) => [lane, row]));
  g.save();
  g.beginPath();
  g.rect(LEFT, 0, width - LEFT, height);
  g.clip();
  for (let i = 0; i < N; i++) {
    const start = C.start[i], end = start + C.time[i];
    if (!C.time[i] || end < view.from || start > view.to) continue;
    const lane = S[C.lane[i]], name = colour(lane, S[C.phase[i]]);
    if (!colours.has(name)) colours.set(name, css(name));
    g.fillStyle = colours.get(name);
    const w = C.time[i] * scale;
    g.fillRect(LEFT + (start - view.from) * scale, rowOf.get(lane) * (ROW + GAP), w > 3 ? w - 0.6 : Math.max(w, 0.4), ROW);
    if (w > 60) {
      g.fillStyle = css("--card");
      const text = S[C.op[i]];
      if (g.measureText(text).width < w - 8) g.fillText(text, LEFT + Math.max(start - view.from, 0) * scale + 5, rowOf.get(lane) * (ROW + GAP) + ROW / 2);
    }
  }
  g.restore();
  g.fillStyle = css("--soft");
  g.textAlign = "center";
  for (const tick of steps(view.to - view.from, 8, 10)) {
    const where = LEFT + tick * scale;
    if (where < width - 20) g.fillText(timeText(view.from + tick), Math.max(where, LEFT + 14), height - AXIS / 2);
  }
  canvas.dataset.drawn = String(N);
}
function zoom(from, to) {
  const whole = facts.time.step || 1;
  const span = Math.min(Math.max(to - from, whole / 1e5), whole);
  view.from = Math.min(Math.max(from, 0), whole - span);
  view.to = view.from + span;
  timeline();
}
const middle = () => (view.from + view.to) / 2;
const by = (factor, centre = middle()) => zoom(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
$("zoom-in").addEventListener("click", () => by(0.5));
$("zoom-out").addEventListener("click", () => by(2));
$("zoom-all").addEventListener("click", () => zoom(0, facts.time.step || 1));
const usAt = (event) => view.from + ((event.offsetX - LEFT) * (view.to - view.from)) / (canvas.clientWidth - LEFT);
let pressed = null;
canvas.addEventListener("pointerdown", (event) => { pressed = usAt(event); canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", (event) => {
  const released = usAt(event);
  if (pressed !== null && Math.abs(released - pressed) > (view.to - view.from) / 100) zoom(Math.min(pressed, released), Math.max(pressed, released));
  pressed = null;
});
canvas.addEventListener("dblclick", () => zoom(0, facts.time.step || 1));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  by(event.deltaY > 0 ? 1.25 : 0.8, usAt(event));
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const span = view.to - view.from;
  const moves = { ArrowLeft: () => zoom(view.from - span / 4, view.to - span / 4), ArrowRight: () => zoom(view.from + span / 4, view.to + span / 4), "+": () => by(0.5), "-": () => by(2), Home: () => zoom(0, facts.time.step || 1) };
  if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
});
const tip = $("tip");
canvas.addEventListener("pointermove", (event) => {
  const us = usAt(event), lane = lanes[Math.floor(event.offsetY / (ROW + GAP))];
  const slack = (2 * (view.to - view.from)) / canvas.clientWidth;
  let best = -1, distance = slack;
  if (lane && event.offsetX > LEFT) {
    for (let i = 0; i < N; i++) {
      if (!C.time[i] || S[C.lane[i]] !== lane) continue;
      const off = Math.max(C.start[i] - us, us - C.start[i] - C.time[i], 0);
      if (off < distance || (off === 0 && distance === 0)) { best = i; distance = off; }
    }
  }
  tip.hidden = best < 0;
  if (best < 0) return;
  const c = call(best);
  tip.replaceChildren(
    make("div", { cls: "mono", text: `%${c.name} = ${c.op}(${c.arguments})` }),
    make("div", { cls: "mono soft", text: `${c.type}  ${c.layout}` }),
    make("div", { text: `${timeText(c.time)} at ${timeText(c.start)}, ${c.phase}` }),
    make("div", { cls: "mono soft", text: [c.module, c.source].filter(Boolean).join("  ") }),
  );
  const left = Math.min(event.offsetX + 14, canvas.clientWidth - Math.min(420, tip.offsetWidth) - 4);
  tip.style.left = `${Math.max(left, 0)}px`;
  tip.style.top = `${event.offsetY + 18}px`;
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
function timelineLegend() {
  const used = new Set();
  for (let i = 0; i < N; i++) if (C.time[i] && S[C.lane[i]] === "compute") used.add(S[C.phase[i]]);
  const entries = [...["forward", "backward", "update"].filter((phase) => used.has(phase)).map((phase) => [phase, `--${phase}`])];
  for (const axis of facts.mesh) if (axis.collectives) entries.push([`communication over ${axis.axis}`, colour(axis.axis)]);
  $("timeline-legend").replaceChildren(...entries.map(([text, name]) => {
    const entry = make("span", { text });
    entry.style.setProperty("--of", `var(${name})`);
    return entry;
  }));
}

// ---- collectives

const place = (side) => [side.what, side.source].filter(Boolean).join(" ");
function causeText(row) {
  if (!row.causes.length) return row.why;
  const { maker, user } = row.causes[0];
  const more = row.causes.length > 1 ? ` (and ${row.causes.length - 1} more)` : "";
  const [a, b] = row.times ? [pattern(maker.what), pattern(user.what)] : [maker.what, user.what];
  return `${a} gives ${maker.placement}, ${b} wants ${user.placement}${more}`;
}
function sentence(bold, ...rest) {
  return make("p", {}, make("b", { text: bold }), ...rest);
}
function sideText(side) {
  return [side.what, side.source && `at ${side.source}`, side.module && `in ${side.module}`].filter(Boolean).join(" ");
}
function collectiveMore(row) {
  const said = [];
  const shown = row.causes.slice(0, 12);
  for (const { value, maker, user } of shown) said.push(sentence(`${value} `, `is ${maker.placement} as ${sideText(maker)} gives it; ${sideText(user)} wants ${user.placement}.`));
  if (row.causes.length > shown.length) said.push(make("p", { text: `and ${row.causes.length - shown.length} more values` }));
  if (!row.causes.length) said.push(sentence("Why ", row.why));
  const other = row.alternative;
  if (other) {
    const price = `${signed(other.price)} for this one collective`;
    const open = other.price >= 0 ? "it was rejected for its price" : "it was open, and is cheaper on this device alone";
    const verdict = other.open ? open : `${kindOf[row.axis]} rules it out`;
    said.push(sentence("Instead ", `${other.what}: ${price}; ${verdict}.`));
  } else if (row.causes.length) said.push(sentence("Instead ", "no other rule makes this unnecessary."));
  const exposed = row.exposed > 0.05 ? `${timeText(row.exposed)} of it exposed` : "hidden behind compute";
  said.push(sentence("When ", `${row.times ? "the first " : ""}at ${timeText(row.start)}, ${exposed}, ${row.phase}.`));
  return said;
}
function otherWay(row) {
  if (!row.alternative) return "none";
  const { price, what, open } = row.alternative;
  return make("span", { text: signed(price), title: what }, make("span", { cls: "soft", text: `${row.times ? " each" : ""}${open ? "" : ", ruled out"}` }));
}
if (facts.collectives.length) {
  table($("collectives-table"), {
    noun: "collectives",
    rows: facts.collectives,
    group: (r) => JSON.stringify([r.kind, r.axis, r.dtype, r.bytes, r.values, r.phase, pattern(r.module), r.causes.slice(0, 1).map((c) => [pattern(c.maker.what), c.maker.source, c.maker.placement, pattern(c.user.what), c.user.source, c.user.placement])]),
    more: collectiveMore,
    sort: [4, true],
    columns: [
      { title: "Collective", cls: "nowrap", value: (r) => r.kind, show: (r) => make("span", {}, make("span", { cls: "soft", text: times(r) }), make("span", { cls: "mono", text: r.kind })) },
      { title: "Axis", value: (r) => r.axis, cls: "mono" },
      { title: "Values", value: (r) => r.values, num: true },
      { title: "Sent by a rank", value: (r) => r.bytes, show: (r) => bytesText(r.bytes), num: true, sum: "bytes" },
      { title: "Time", value: (r) => r.time, show: (r) => timeText(r.time), num: true, sum: "time" },
      { title: "Exposed", value: (r) => r.exposed, show: (r) => exposedText(r.exposed), num: true, sum: "exposed" },
      { title: "Because", value: causeText, cls: "name" },
      { title: "Cheapest other way", value: (r) => (r.alternative ? r.alternative.price : Infinity), text: (r) => (r.alternative ? r.alternative.what : ""), show: (r) => otherWay(r), num: true },
      { title: "Line", value: (r) => r.source, cls: "mono" },
    ],
  });
} else $("collectives-table").append(make("p", { cls: "soft", text: "Nothing is sent." }));

// ---- parameters

function placements(row) {
  const made = make("span", { cls: "placements" });
  row.placements.forEach((placement, i) => {
    made.append(make("span", { cls: `tag mono${placement === "R" ? "" : " sharded"}`, text: `${placement}@${axes[i]}` }), " ");
  });
  return made;
}
const shape = (dims) => `[${dims.join(", ")}]`;
if (facts.parameters.length) {
  table($("parameters-table"), {
    noun: "parameters",
    rows: facts.parameters,
    group: (r) => JSON.stringify([pattern(r.name), r.dtype, r.shape, r.local, r.placements, r.why]),
    more: (row) => [
      ...row.why.map((why, i) => sentence(`${row.placements[i]} on ${axes[i]} `, why || "nothing is said of it")),
      sentence("Whole ", `${bytesText(row.whole_bytes)} over all ranks${row.times ? ", each" : ""}.`),
      ...(row.members ? [make("p", { cls: "mono", text: row.members.map((m) => m.name).join("  ") })] : []),
    ],
    columns: [
      { title: "Parameter", value: (r) => (r.times ? pattern(r.name) : r.name), show: (r) => make("span", {}, make("span", { cls: "soft", text: times(r) }), make("span", { cls: "mono", text: r.times ? pattern(r.name) : r.name })), cls: "nowrap" },
      { title: "Global shape", value: (r) => `${r.dtype}${shape(r.shape)}`, sort: (r) => r.shape.reduce((a, b) => a * b, 1), cls: "mono nowrap" },
      { title: "A rank's", value: (r) => shape(r.local), sort: (r) => r.local.reduce((a, b) => a * b, 1), cls: "mono nowrap" },
      { title: "Placement", value: (r) => r.placements.map((p, i) => `${p}@${axes[i]}`).join(" "), show: placements },
      { title: "On a rank", value: (r) => r.bytes, show: (r) => bytesText(r.bytes), num: true, sum: "bytes" },
      { title: "Optimizer state", value: (r) => r.state_bytes, show: (r) => bytesText(r.state_bytes), num: true, sum: "state_bytes" },
      { title: "Why", value: (r) => r.why.filter(Boolean).join("; "), cls: "soft clip" },
    ],
  });
} else $("parameters-table").append(make("p", { cls: "soft", text: "The step has no parameters." }));

// ---- the program by module

function newModule(name, path) {
  return { name, path, children: new Map(), calls: [], count: 0, compute: 0, sent: 0, sending: 0, parameters: 0 };
}
const root = newModule(facts.step, "");
function moduleAt(path) {
  const found = [root];
  if (path) path.split(".").forEach((name, i, all) => {
    const above = found[found.length - 1];
    if (!above.children.has(name)) above.children.set(name, newModule(name, all.slice(0, i + 1).join(".")));
    found.push(above.children.get(name));
  });
  return found;
}
const bytesOf = new Map(facts.collectives.map((c) => [c.name.replace(/^%/, ""), c.bytes]));
for (let i = 0; i < N; i++) {
  const above = moduleAt(S[C.module[i]]);
  above[above.length - 1].calls.push(i);
  const sends = S[C.lane[i]] !== "compute";
  for (const module of above) {
    module.count++;
    if (sends) { module.sending += C.time[i]; module.sent += bytesOf.get(C.name[i]) || 0; } else module.compute += C.time[i];
  }
}
for (const parameter of facts.parameters) {
  const path = parameter.name.split(".").slice(0, -1).join(".");
  for (const module of moduleAt(path)) module.parameters += parameter.bytes;
}
const treeBody = $("tree-body");
const cells = (row, ...texts) => texts.forEach((text, i) => row.append(make("td", { cls: i ? "num" : "", text })));
function moduleRow(module, depth) {
  const row = make("tr", { cls: "row open" });
  const twisty = make("button", { type: "button", cls: "twisty", text: "\u25b8", "aria-expanded": "false", "aria-label": `open ${module.path || module.name}` });
  const first = make("td", {}, twisty, make("span", { cls: "mono", text: module.name }));
  first.style.paddingLeft = `${10 + 16 * depth}px`;
  row.append(first);
  for (const text of [module.count.toLocaleString("en"), timeText(module.compute), module.sent ? bytesText(module.sent) : "", module.sending ? timeText(module.sending) : "", module.parameters ? bytesText(module.parameters) : ""]) row.append(make("td", { cls: "num", text }));
  let below = null;
  const toggle = () => {
    twisty.textContent = below ? "\u25b8" : "\u25be";
    twisty.setAttribute("aria-expanded", String(!below));
    if (below) { below.forEach((close) => close()); below = null; return; }
    const made = [...module.children.values()].map((child) => moduleRow(child, depth + 1));
    const calls = module.calls.length ? [callsRow(module.calls, depth + 1)] : [];
    row.after(...made.map((m) => m.row), ...calls);
    below = [...made.map((m) => m.close), ...calls.map((c) => () => c.remove())];
  };
  row.addEventListener("click", toggle);
  return { row, toggle, close: () => { if (below) toggle(); row.remove(); } };
}
function callLine(i) {
  const c = call(i);
  const row = make("tr");
  row.append(make("td", { cls: "mono name", text: `%${c.name} = ${c.op}(${c.arguments})` }));
  row.append(make("td", { cls: "mono", text: c.type }), make("td", { cls: "mono", text: c.layout }));
  row.append(make("td", { cls: "num", text: c.time ? timeText(c.time) : "" }), make("td", { text: c.phase }));
  row.append(make("td", { cls: "mono", text: c.source }));
  return row;
}
function callTable(list, limit) {
  const body = make("tbody");
  list.slice(0, limit).forEach((i) => body.append(callLine(i)));
  if (list.length > limit) {
    const button = make("button", { type: "button", text: `${(list.length - limit).toLocaleString("en")} more` });
    const last = make("tr", {}, make("td", { colspan: 6 }, button));
    button.addEventListener("click", () => { last.remove(); list.slice(limit).forEach((i) => body.append(callLine(i))); });
    body.append(last);
  }
  const head = make("tr", {}, ...["Call", "Type", "Layout"].map((text) => make("th", { text })), make("th", { cls: "num", text: "Time" }), make("th", { text: "Phase" }), make("th", { text: "Line" }));
  return make("table", {}, make("thead", {}, head), body);
}
function callsRow(list, depth) {
  const cell = make("td", { colspan: 6 }, callTable(list, 200));
  cell.style.paddingLeft = `${10 + 16 * depth}px`;
  return make("tr", { cls: "calls" }, cell);
}
const whole = moduleRow(root, 0);
treeBody.append(whole.row);
if (N || root.children.size) {
  whole.toggle();
  treeBody.querySelectorAll("tr.calls").forEach((row) => row.remove());
  if (root.calls.length) {
    const outside = { ...newModule("(outside of modules)", ""), calls: root.calls, count: root.calls.length };
    for (const i of root.calls) { if (S[C.lane[i]] === "compute") outside.compute += C.time[i]; else { outside.sending += C.time[i]; outside.sent += bytesOf.get(C.name[i]) || 0; } }
    treeBody.append(moduleRow(outside, 1).row);
  }
}
const programSearch = $("program-search");
programSearch.addEventListener("input", () => {
  const words = programSearch.value.toLowerCase().split(/\s+/).filter(Boolean);
  $("tree").hidden = words.length > 0;
  $("found").replaceChildren();
  $("program-count").textContent = `${N.toLocaleString("en")} calls`;
  if (!words.length) return;
  const list = [];
  for (let i = 0; i < N; i++) {
    const c = call(i);
    const text = `%${c.name} ${c.op} ${c.arguments} ${c.type} ${c.layout} ${c.module} ${c.source} ${c.phase} ${c.lane}`.toLowerCase();
    if (words.every((word) => text.includes(word))) list.push(i);
  }
  $("program-count").textContent = `${list.length.toLocaleString("en")} of ${N.toLocaleString("en")} calls`;
  $("found").append(callTable(list, 200));
});
$("program-count").textContent = `${N.toLocaleString("en")} calls`;

// ---- all that has colours of the theme

function redraw() {
  memoryBar();
  memoryCurve();
  timeline();
  timelineLegend();
}
addEventListener("resize", timeline);
setTheme(prefersDark.matches);
document.documentElement.dataset.ready = "yes";
})();
