// Zooms the timelines of the page: redraws each lane from its boxes, by task when far and by op when near.
"use strict";
const SVG = document.createElement("template"); // names the namespace of SVG without an address
SVG.innerHTML = "<svg></svg>";
const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

function duration(seconds) {
  const [size, name] = UNITS.find(([one]) => seconds >= one) || UNITS[3];
  return `${Number((seconds / size).toPrecision(3))} ${name}`;
}

function moment(seconds, width) { // as many digits as the window shows
  const [size, name] = UNITS.find(([one]) => seconds >= one) || UNITS[3];
  return `${(seconds / size).toFixed(Math.max(0, Math.min(6, Math.ceil(Math.log10(size / width)) + 2)))} ${name}`;
}

function readable(amount, unit, base) { // 936256, "B", 1024 -> 914 KiB
  const names = base === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T", "P"];
  const power = Math.max(0, Math.min(names.length - 1, Math.floor(Math.log(amount) / Math.log(base))));
  return `${Number((amount / base ** power).toPrecision(3))} ${names[power]}${unit}`;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function lanesOf(data) { // boxes in ticks: start, end, name, kind, task
  return data.lanes.map((row) => {
    const boxes = [];
    let now = 0;
    for (let at = 0; at < row.length; at += 4) {
      const [name, kind, amount] = data.names[row[at]], start = now + row[at + 2];
      now = start + row[at + 3];
      boxes.push({ start, end: now, name, kind, amount, task: data.tasks[row[at + 1]] });
    }
    return boxes;
  });
}

function joined(run) { // several ops as one label: their layers, if they have numbers, and the task
  const numbers = run.names.map((name) => /\.(\d+)(\D|$)/.exec(name)).filter(Boolean).map((found) => Number(found[1]));
  const kind = run.op || run.name.split(":")[0];
  if (!numbers.length) return `${kind} ${run.task}`;
  const least = Math.min(...numbers), most = Math.max(...numbers);
  return `L${least === most ? least : `${least}-${most}`} ${kind} ${run.task}`;
}

const LIGHT = {}; // by kind: whether its colour asks for dark ink

function isLight(element, kind) {
  if (kind in LIGHT) return LIGHT[kind];
  const made = document.createElement("i");
  made.className = kind; element.append(made);
  const parts = getComputedStyle(made).color.match(/[\d.]+/g).slice(0, 3).map((one) => { const part = one / 255; return part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4; });
  made.remove();
  return LIGHT[kind] = .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2] > .179; // black has more contrast from here on
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const kind in LIGHT) delete LIGHT[kind]; });

class Timeline {
  constructor(element, data) {
    this.element = element; this.unit = data.unit_s; this.lanes = lanesOf(data); this.teams = data.teams; this.query = "";
    this.svgs = [...element.querySelectorAll(".lane svg")];
    this.axis = element.querySelector(".ticks"); this.output = element.querySelector("output");
    this.full = this.svgs.reduce((most, _, lane) => this.lanes[lane].reduce((end, box) => Math.max(end, box.end), most), 1);
    this.from = 0; this.to = this.full; this.lane = 0; this.index = -1; this.hidden = new Set();
    this.overview(); this.arrows = this.made("svg", { class: "arrows" }); element.append(this.arrows);
    this.listen(); this.draw();
    new ResizeObserver(() => this.draw()).observe(element);
  }

  draw() {
    const width = this.svgs[0].clientWidth || 600, scale = width / (this.to - this.from);
    this.svgs.forEach((svg, lane) => this.drawLane(svg, lane, width, scale));
    this.drawAxis(width);
    this.frame.setAttribute("x", 500 * this.from / this.full); this.frame.setAttribute("width", Math.max(1, 500 * (this.to - this.from) / this.full));
    this.drawArrows(this.lane, this.lanes[this.lane][this.index]);
  }

  overview() { // the whole step in a strip above the lanes, with a frame around the part that they show
    const drawn = this.svgs.filter((svg) => !svg.matches(".predicted")), strip = document.createElement("div");
    this.map = this.made("svg", { class: "map", viewBox: `0 0 500 ${drawn.length}`, preserveAspectRatio: "none" });
    drawn.forEach((svg, row) => {
      const lane = this.made("g", { transform: `translate(0 ${row})` });
      lane.append(...[...svg.children].map((path) => path.cloneNode()));
      this.map.append(lane);
    });
    this.frame = this.made("rect", { class: "frame", y: 0, height: drawn.length });
    this.map.append(this.frame); this.map.style.height = `${Math.max(10, Math.min(36, 3 * drawn.length))}px`;
    strip.className = "axis overview"; strip.append(document.createElement("span"), this.map);
    this.element.querySelector(".group").before(strip);
  }

  partners(lane, box) { // the ops of other ranks that meet an op: the same collective, or the other end of a message
    if (!this.teams[lane]) return [];
    const owner = (one) => one.name.slice(one.name.indexOf(":") + 1), kind = (one) => one.name.split(":")[0].replace(/send|recv/, "message");
    const met = this.lanes.map((row, other) => {
      if (other === lane || this.teams[other] !== this.teams[lane] || this.svgs[other].matches(".predicted") !== this.svgs[lane].matches(".predicted")) return null;
      const same = row.filter((one) => one.task === box.task && owner(one) === owner(box) && kind(one) === kind(box));
      return same.length ? { lane: other, box: same.reduce((best, one) => Math.abs(one.end - box.end) < Math.abs(best.end - box.end) ? one : best) } : null;
    });
    return met.filter(Boolean);
  }

  meeting(lane, box) { // the op for which the others wait: a send, or the last to begin; and those others
    const every = [{ lane, box }, ...this.partners(lane, box)];
    const source = every.find((one) => one.box.name.startsWith("send:")) || every.reduce((last, one) => one.box.start > last.box.start ? one : last);
    return { source, others: every.filter((one) => one !== source) };
  }

  drawArrows(lane, box) {
    const area = this.element.getBoundingClientRect(), { source, others } = box ? this.meeting(lane, box) : { others: [] };
    const place = ({ lane: at, box: one }) => { // the begin of an op, within the window
      const svg = this.svgs[at].getBoundingClientRect(), part = (one.start - this.from) / (this.to - this.from);
      return [svg.left - area.left - this.element.clientLeft + Math.max(0, Math.min(1, part)) * svg.width, svg.top - area.top - this.element.clientTop + svg.height / 2];
    };
    this.arrows.replaceChildren(...others.map((other) => {
      const [x, y] = place(source), [left, top] = place(other), way = top > y ? 1 : -1;
      return this.made("path", { d: `M${x} ${y}L${left} ${top - 4 * way}M${left - 4} ${top - 8 * way}L${left} ${top - 2 * way}L${left + 4} ${top - 8 * way}` });
    }));
  }

  isFound(box) { return `${box.name} ${box.task}`.toLowerCase().includes(this.query); }

  find(query) {
    this.query = query.trim().toLowerCase();
    const found = this.query ? this.lanes.flatMap((row) => row.filter((box) => this.isFound(box))) : [];
    const seconds = found.reduce((sum, box) => sum + box.end - box.start, 0) * this.unit;
    this.output.textContent = this.query ? `${found.length} operations found, ${found.length ? duration(seconds) : "0 s"} in all. Enter shows the next one.` : "";
    this.draw();
  }

  next(step) { // the next op that is found, or the one before, in the order of time
    const found = this.lanes.flatMap((row, lane) => row.map((box, index) => ({ lane, box, index }))).filter((one) => this.query && this.isFound(one.box));
    if (!found.length) return;
    found.sort((one, other) => one.box.start - other.box.start || one.lane - other.lane);
    const now = found.findIndex((one) => one.lane === this.lane && one.index === this.index);
    const { lane, box, index } = found[(now + step + found.length) % found.length];
    [this.lane, this.index] = [lane, index];
    if (box.start < this.from || box.end > this.to) this.show((box.start + box.end - this.to + this.from) / 2, this.to - this.from);
    this.output.textContent = this.said(lane, box);
    this.draw();
  }

  drawLane(svg, lane, width, scale) {
    const height = svg.clientHeight, paths = {}, labels = [], selected = lane === this.lane ? this.lanes[lane][this.index] : null;
    let run = null;
    const close = () => {
      if (!run) return;
      const wide = Math.max(run.end - run.start - (run.end - run.start > 4 ? .6 : 0), .35);
      (paths[run.kind] ||= []).push(`M${run.start.toFixed(1)} ${height / 2}h${wide.toFixed(1)}`);
      if (wide > 22 && height > 12) labels.push([run.start, wide, run.count === 1 && !/\.\d+(\D|$)/.test(run.name) ? run.name : joined(run), run.kind]);
      run = null;
    };
    for (const box of this.lanes[lane]) {
      if (box.end < this.from || box.start > this.to) continue;
      const start = Math.max(0, (box.start - this.from) * scale), end = Math.min(width, (box.end - this.from) * scale);
      const joins = run && run.kind === box.kind && run.task === box.task && start - run.end < .5 && end - start < 34;
      if (joins) { run.end = Math.max(end, run.end); run.count += 1; run.names.push(box.name); continue; }
      if (run && end - run.start < .5 && start - run.end < .5) { run.end = Math.max(run.end, end); continue; } // smaller than half a pixel
      close();
      run = { start, end, kind: box.kind, task: box.task, name: box.name, names: [box.name], count: 1, op: this.isCompute(lane) ? "" : box.name.split(":")[0] };
    }
    close();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...Object.entries(paths).map(([kind, parts]) => this.made("path", { class: kind, d: parts.join(""), style: `stroke-width:${height}${this.hidden.has(kind) ? ";opacity:.08" : this.query ? ";opacity:.2" : ""}` })), ...this.foundPaths(lane, scale, height),
      ...labels.filter((label) => !this.query && !this.hidden.has(label[3])).map((label) => this.label(...label)).filter(Boolean));
    if (selected && selected.end > this.from && selected.start < this.to) {
      svg.append(this.made("rect", { class: "cursor", x: (selected.start - this.from) * scale, y: .75, width: Math.max(2, (selected.end - selected.start) * scale), height: height - 1.5 }));
    }
  }

  foundPaths(lane, scale, height) {
    const found = {};
    for (const box of this.query ? this.lanes[lane] : []) {
      if (box.end >= this.from && box.start <= this.to && this.isFound(box)) (found[box.kind] ||= []).push(`M${((box.start - this.from) * scale).toFixed(1)} ${height / 2}h${Math.max(1.5, (box.end - box.start) * scale).toFixed(1)}`);
    }
    return Object.entries(found).map(([kind, parts]) => this.made("path", { class: `${kind} found`, d: parts.join(""), style: `stroke-width:${height}` }));
  }

  isCompute(lane) { return /compute/.test(this.svgs[lane].getAttribute("aria-label")); }

  label(start, width, text, kind) {
    const bare = text.slice(text.indexOf(":") + 1); // the longest form that fits: kind and layer, layer, its last words, without the task, its first word
    const forms = [text, bare, bare.split(".").slice(-2).join("."), text.split(" ").slice(0, 2).join(" "), text.includes(" ") && !text.includes(":") ? text.split(" ")[0] : ""];
    const shown = forms.find((one) => one && one.length * 5.9 <= width - 6);
    if (!shown) return null;
    const made = this.made("text", { x: start + 3, y: 11, class: isLight(this.element, kind) ? "dark" : "light" });
    made.textContent = shown;
    return made;
  }

  drawAxis(width) {
    const seconds = (this.to - this.from) * this.unit, most = Math.max(2, Math.floor(width / 90));
    const power = 10 ** Math.floor(Math.log10(seconds / most));
    const step = [1, 2, 5, 10, 20].map((one) => one * power).find((one) => one * most >= seconds);
    const first = Math.ceil(this.from * this.unit / step - 1e-9), marks = [];
    for (let index = first; index * step <= this.to * this.unit * (1 + 1e-12); index++) {
      const mark = document.createElement("i"), left = (index * step - this.from * this.unit) / seconds;
      const [size, unit] = UNITS.find(([one]) => this.to * this.unit >= one) || UNITS[3];
      mark.textContent = index ? `${Number((index * step / size).toFixed(9))} ${unit}` : "0";
      mark.style.left = `${100 * left}%`;
      if (left * width > width - 34) mark.className = "last";
      marks.push(mark);
    }
    this.axis.replaceChildren(...marks);
  }

  made(name, attributes) {
    const made = document.createElementNS(SVG.content.firstChild.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  zoom(factor, at = .5) {
    const middle = this.from + at * (this.to - this.from), width = Math.min(this.full, Math.max(64, (this.to - this.from) * factor));
    this.show(middle - at * width, width);
  }

  show(from, width) {
    this.from = Math.max(0, Math.min(from, this.full - width)); this.to = this.from + width;
    this.draw();
  }

  move(part) { this.show(this.from + part * (this.to - this.from), this.to - this.from); }

  do(word) {
    const width = this.to - this.from;
    ({ in: () => this.zoom(.5), out: () => this.zoom(2), left: () => this.move(-.25), right: () => this.move(.25), all: () => this.show(0, this.full) })[word]();
    return width;
  }

  select(lanes, boxes) { // by keyboard: another lane, or the next op of this one
    this.lane = (this.lane + lanes + this.lanes.length) % this.lanes.length;
    const row = this.lanes[this.lane];
    if (!row.length) return;
    const first = row.findIndex((box) => box.end > this.from);
    this.index = lanes || this.index < 0 ? Math.max(0, first) : Math.max(0, Math.min(row.length - 1, this.index + boxes));
    const box = row[this.index];
    if (box.start < this.from || box.end > this.to) this.show((box.start + box.end - this.to + this.from) / 2, this.to - this.from);
    this.output.textContent = this.said(this.lane, box);
    this.draw();
  }

  said(lane, box) {
    const name = this.svgs[lane].getAttribute("aria-label"), seconds = (box.end - box.start) * this.unit;
    const [unit, base] = this.isCompute(lane) ? ["FLOP", 1000] : ["B", 1024];
    const rate = box.amount ? `, ${readable(box.amount, unit, base)}, ${readable(box.amount / seconds, `${unit}/s`, 1000)}` : "";
    const above = this.lanes[this.svgs.findIndex((svg) => svg.getAttribute("aria-label") === `${name}, predicted`)] || [];
    const twin = above.find((one) => one.name === box.name && one.task === box.task);
    const predicted = twin ? `, ${duration((twin.end - twin.start) * this.unit)} predicted` : "";
    const { source, others } = this.meeting(lane, box), last = this.svgs[source.lane].getAttribute("aria-label").split(",")[0];
    const waits = !others.length || source.box.name.startsWith("send:") ? "" : source.box === box ? ", the last to begin" : `, waits ${duration((source.box.start - box.start) * this.unit)} for ${last}`;
    return `${name}: ${box.name}${box.task && box.task !== box.name ? ` of ${box.task}` : ""}, ${duration(seconds)} from ${moment(box.start * this.unit, (this.to - this.from) * this.unit)}${rate}${waits}${predicted}`;
  }

  measured(event, held) { // the time between two places, and how much of it the lane is busy
    const box = this.svgs[held.lane].getBoundingClientRect(), width = this.to - this.from;
    const [from, to] = [held.x, event.clientX].sort((one, other) => one - other).map((x) => this.from + Math.max(0, Math.min(1, (x - box.left) / box.width)) * width);
    const busy = this.lanes[held.lane].reduce((sum, one) => sum + Math.max(0, Math.min(one.end, to) - Math.max(one.start, from)), 0);
    this.output.textContent = `${duration((to - from) * this.unit)} from ${moment(from * this.unit, width * this.unit)}; ${this.svgs[held.lane].getAttribute("aria-label")} is busy for ${duration(busy * this.unit)}`;
  }

  at(event) { // the op below the pointer
    const lane = this.svgs.indexOf(event.target.closest("svg"));
    if (lane < 0) return null;
    const box = this.svgs[lane].getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
    const time = this.from + part * (this.to - this.from), near = (this.to - this.from) * 2 / box.width;
    const box_ = this.lanes[lane].find((one) => one.start <= time && one.end >= time) || this.lanes[lane].find((one) => one.end > time - near && one.start < time + near);
    return box_ ? { lane, box: box_ } : null;
  }

  point(event) {
    const found = this.at(event) || { lane: this.lane, box: this.lanes[this.lane][this.index] };
    this.drawArrows(found.lane, found.box);
    return this.at(event) ? showTip(event, this.said(found.lane, found.box)) : hideTip();
  }

  listen() {
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all", w: "in", s: "out", a: "left", d: "right" };
    const chosen = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ",": [0, -1], ".": [0, 1] };
    const search = this.element.querySelector("input");
    search.addEventListener("input", () => this.find(search.value));
    const look = (event) => { // moves the window to a place of the overview
      const box = this.map.getBoundingClientRect(), width = this.to - this.from;
      this.show((event.clientX - box.left) / box.width * this.full - width / 2, width);
    };
    this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); look(event); event.stopPropagation(); });
    this.map.addEventListener("pointermove", (event) => { if (event.buttons) look(event); event.stopPropagation(); });
    let held = null;
    this.element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target === search) {
        if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
        return;
      }
      if (keys[event.key]) this.do(keys[event.key]);
      else if (chosen[event.key]) this.select(...chosen[event.key]);
      else return;
      event.preventDefault();
    });
    this.element.addEventListener("click", (event) => {
      if (event.target.dataset.do) return this.do(event.target.dataset.do);
      const key = event.target.closest(".key");
      if (key) { // a click on a key hides or shows its kind
        const { kind } = key.dataset, shows = this.hidden.delete(kind);
        if (!shows) this.hidden.add(kind);
        key.setAttribute("aria-pressed", shows);
        return this.draw();
      }
      const found = this.at(event); // a click pins an op: its detail stays
      if (!found) return;
      [this.lane, this.index] = [found.lane, this.lanes[found.lane].indexOf(found.box)];
      this.output.textContent = this.said(found.lane, found.box);
      this.draw();
    });
    this.element.addEventListener("wheel", (event) => {
      const svg = event.target.closest("svg");
      if (!svg || !(event.ctrlKey || event.shiftKey)) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      if (event.shiftKey) this.move((event.deltaX || event.deltaY) / box.width);
      else this.zoom(Math.exp(event.deltaY / 200), (event.clientX - box.left) / box.width);
    }, { passive: false });
    this.element.addEventListener("dblclick", (event) => {
      const svg = event.target.closest("svg");
      if (svg) this.zoom(.25, (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth);
    });
    const fingers = new Map(); // by pointer: its place; two of them pinch
    const spread = () => { const [one, other] = [...fingers.values()]; return Math.max(10, Math.abs(one - other)); };
    this.element.addEventListener("pointerdown", (event) => {
      if (!event.target.closest("svg")) return;
      if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX);
      held = { x: event.clientX, from: this.from, lane: this.svgs.indexOf(event.target.closest("svg")), measures: event.shiftKey };
    });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, (event) => { fingers.delete(event.pointerId); held = null; });
    this.element.addEventListener("pointermove", (event) => {
      if (fingers.size === 2 && fingers.has(event.pointerId)) {
        const before = spread(), box = this.svgs[0].getBoundingClientRect();
        fingers.set(event.pointerId, event.clientX);
        const middle = [...fingers.values()].reduce((sum, x) => sum + x, 0) / 2;
        return this.zoom(before / spread(), (middle - box.left) / box.width);
      }
      if (held && held.measures) return this.measured(event, held);
      if (held) { const width = this.to - this.from; this.show(held.from - (event.clientX - held.x) / this.svgs[0].clientWidth * width, width); }
      this.point(event);
    });
    this.element.addEventListener("pointerleave", hideTip);
  }
}

const tip = document.createElement("div");
tip.className = "tip"; tip.hidden = true;
document.body.append(tip);

function showTip(event, text) {
  tip.textContent = text; tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

function hideTip() { tip.hidden = true; }

for (const element of document.querySelectorAll(".timeline")) {
  const packed = element.querySelector(".boxes");
  if (matchMedia("(hover: none)").matches && packed) element.querySelector("output").textContent = "Drag to move, pinch to zoom. Tap an operation to keep its details.";
  if (packed) unpacked(packed.textContent).then((data) => new Timeline(element, data));
}

const figures = [...document.querySelectorAll(".of-step")]; // a button for each step, as high as it is long, shows its timeline
if (figures.length > 1) {
  const steps = document.createElement("div"), longest = Math.max(...figures.map((one) => one.dataset.seconds));
  steps.className = "steps"; steps.setAttribute("role", "group"); steps.setAttribute("aria-label", "Steps");
  for (const figure of figures) {
    const button = document.createElement("button"), bar = document.createElement("i");
    bar.style.height = `${20 * figure.dataset.seconds / longest}px`;
    button.append(bar, `step ${figure.dataset.step} · ${duration(figure.dataset.seconds)}`);
    button.setAttribute("aria-pressed", !figure.hidden);
    button.addEventListener("click", () => figures.forEach((one, index) => {
      one.hidden = one !== figure;
      steps.children[index].setAttribute("aria-pressed", one === figure);
    }));
    steps.append(button);
  }
  figures[0].before(steps);
}

for (const command of document.querySelectorAll(".verdict code, code.line")) { // a click copies the command
  const button = document.createElement("button");
  button.className = "copy"; button.textContent = "copy";
  button.addEventListener("click", () => navigator.clipboard?.writeText(command.textContent).then(() => { button.textContent = "copied"; }));
  command.after(" ", button);
}

addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
