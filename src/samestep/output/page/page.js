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
      const [name, kind] = data.names[row[at]], start = now + row[at + 2];
      now = start + row[at + 3];
      boxes.push({ start, end: now, name, kind, task: data.tasks[row[at + 1]] });
    }
    return boxes;
  });
}

class Timeline {
  constructor(element, data) {
    this.element = element; this.unit = data.unit_s; this.lanes = lanesOf(data);
    this.svgs = [...element.querySelectorAll(".lane svg")];
    this.axis = element.querySelector(".ticks"); this.output = element.querySelector("output");
    this.full = this.svgs.reduce((most, _, lane) => this.lanes[lane].reduce((end, box) => Math.max(end, box.end), most), 1);
    this.from = 0; this.to = this.full; this.lane = 0; this.index = -1;
    this.listen(); this.draw();
    new ResizeObserver(() => this.draw()).observe(element);
  }

  draw() {
    const width = this.svgs[0].clientWidth || 600, scale = width / (this.to - this.from);
    this.svgs.forEach((svg, lane) => this.drawLane(svg, lane, width, scale));
    this.drawAxis(width);
  }

  drawLane(svg, lane, width, scale) {
    const height = svg.clientHeight, paths = {}, labels = [], selected = lane === this.lane ? this.lanes[lane][this.index] : null;
    let run = null;
    const close = () => {
      if (!run) return;
      const wide = Math.max(run.end - run.start - (run.end - run.start > 4 ? .6 : 0), .35);
      (paths[run.kind] ||= []).push(`M${run.start.toFixed(1)} ${height / 2}h${wide.toFixed(1)}`);
      if (wide > 22 && height > 12) labels.push([run.start, wide, run.count === 1 ? run.name : run.op ? `${run.op} ${run.task}` : run.task]);
      run = null;
    };
    for (const box of this.lanes[lane]) {
      if (box.end < this.from || box.start > this.to) continue;
      const start = Math.max(0, (box.start - this.from) * scale), end = Math.min(width, (box.end - this.from) * scale);
      const joins = run && run.kind === box.kind && run.task === box.task && start - run.end < .5 && end - start < 34;
      if (joins) { run.end = Math.max(end, run.end); run.count += 1; continue; }
      if (run && end - run.start < .5 && start - run.end < .5) { run.end = Math.max(run.end, end); continue; } // smaller than half a pixel
      close();
      run = { start, end, kind: box.kind, task: box.task, name: box.name, count: 1, op: this.isCompute(lane) ? "" : box.name.split(":")[0] };
    }
    close();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...Object.entries(paths).map(([kind, parts]) => this.made("path", { class: kind, d: parts.join(""), style: `stroke-width:${height}` })),
      ...labels.map((label) => this.label(...label)).filter(Boolean));
    if (selected && selected.end > this.from && selected.start < this.to) {
      svg.append(this.made("rect", { class: "cursor", x: (selected.start - this.from) * scale, y: .75, width: Math.max(2, (selected.end - selected.start) * scale), height: height - 1.5 }));
    }
  }

  isCompute(lane) { return /compute/.test(this.svgs[lane].getAttribute("aria-label")); }

  label(start, width, text) {
    const bare = text.slice(text.indexOf(":") + 1); // the longest form that fits: kind and layer, layer, its last words, the task
    const forms = [text, bare, bare.split(".").slice(-2).join("."), text.includes(" ") && !text.includes(":") ? text.split(" ")[0] : ""];
    const shown = forms.find((one) => one && one.length * 5.9 <= width - 6);
    if (!shown) return null;
    const made = this.made("text", { x: start + 3, y: 11 });
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
    return `${this.svgs[lane].getAttribute("aria-label")}: ${box.name}${box.task && box.task !== box.name ? ` of ${box.task}` : ""}, ${duration((box.end - box.start) * this.unit)} from ${moment(box.start * this.unit, (this.to - this.from) * this.unit)}`;
  }

  point(event) {
    const lane = this.svgs.indexOf(event.target.closest("svg"));
    if (lane < 0) return hideTip();
    const box = this.svgs[lane].getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
    const time = this.from + part * (this.to - this.from), near = (this.to - this.from) * 2 / box.width;
    const found = this.lanes[lane].find((one) => one.start <= time && one.end >= time) || this.lanes[lane].find((one) => one.end > time - near && one.start < time + near);
    return found ? showTip(event, this.said(lane, found)) : hideTip();
  }

  listen() {
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all" };
    const chosen = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ",": [0, -1], ".": [0, 1] };
    let held = null;
    this.element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (keys[event.key]) this.do(keys[event.key]);
      else if (chosen[event.key]) this.select(...chosen[event.key]);
      else return;
      event.preventDefault();
    });
    this.element.addEventListener("click", (event) => { if (event.target.dataset.do) this.do(event.target.dataset.do); });
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
    this.element.addEventListener("pointerdown", (event) => { if (event.target.closest("svg")) held = { x: event.clientX, from: this.from }; });
    addEventListener("pointerup", () => { held = null; });
    this.element.addEventListener("pointermove", (event) => {
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
  if (packed) unpacked(packed.textContent).then((data) => new Timeline(element, data));
}
