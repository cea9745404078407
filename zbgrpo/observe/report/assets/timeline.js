"use strict";
// All ranks on one clock. A strip shows where a rank's time went: where a rank was only partly busy, or where a pixel has
// many intervals, the height of a colour is its share. Times are microseconds since the start.

const RULER = 26, STRIP = 26, TRACK = 9, GAP = 10, HUB = 44;
const CODE = Object.fromEntries(ACCOUNTS.map((name, n) => [name, n]));
const LOST = BUBBLE.map(name => CODE[name]);
const OUTSIDE = [CODE.startup, CODE.shutdown];

// Flat numbers of the page to arrays; see `timelines` in timeline.py. An interval's accounts are those from `first` on.
function unpackAccounts(flat) {
  const begin = [], end = [], first = [], account = [], share = [];
  let at = 0;
  for (let n = 0; n < flat.length;) {
    begin.push(at += flat[n]);
    end.push(at += flat[n + 1]);
    first.push(account.length);
    const stop = n + 3 + 2 * flat[n + 2];
    for (n += 3; n < stop; n += 2) { account.push(flat[n]); share.push(flat[n + 1] / 1000); }
  }
  first.push(account.length);
  return {size: begin.length, begin: Float64Array.from(begin), end: Float64Array.from(end), first: Int32Array.from(first), account: Uint8Array.from(account), share: Float32Array.from(share)};
}

function unpackSpans(flat) {
  const size = flat.length / 4, made = {size, name: [], number: []};
  for (const name of ["begin", "end", "latest"]) made[name] = new Float64Array(size);
  let at = 0, latest = 0;
  for (let n = 0; n < size; n++) {
    made.begin[n] = at += flat[4 * n];
    made.end[n] = at += flat[4 * n + 1];
    made.latest[n] = latest = Math.max(latest, at);
    made.name.push(flat[4 * n + 2]);
    made.number.push(flat[4 * n + 3]);
  }
  return made;
}

// First place in a rising array whose value is above `value`.
function after(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// As `ticks`, in microseconds; from ten seconds on at round times of a clock.
function timeTicks(from, to, about) {
  const raw = (to - from) / Math.max(1, about) / 1e6;
  const step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find(seconds => seconds >= raw) * 1e6;
  if (raw <= 10 || !(step > 0)) return ticks(from, to, about);
  const first = Math.ceil(from / step);
  return Array.from({length: Math.max(0, Math.floor(to / step) - first + 1)}, (_, n) => (first + n) * step);
}

// A time on the ruler, with as many digits as tell it from its neighbours.
function clockTime(time, step) {
  const seconds = time / 1e6, digits = Math.max(0, -Math.floor(Math.log10(step / 1e6) + 1e-9));
  if (!(digits > 0) && seconds >= 60) return duration(seconds);
  return time ? `${seconds.toFixed(Math.min(6, digits || 0))} s` : "0";
}

class Timeline {
  constructor(timeline) {
    this.names = timeline.names;
    this.length = Math.max(1, timeline.length);
    this.counters = Object.entries(timeline.counters).map(([name, points], n) => ({name, points, times: Float64Array.from(points, point => point[0]), colour: n}));
    this.commits = timeline.commits;
    this.rows = timeline.rows.map(row => ({...row, accounts: unpackAccounts(row.accounts), tracks: row.tracks.map(track => ({title: track.name, ...unpackSpans(track.spans)}))}));
    this.to = this.length;
    this.from = this.workBegins();
    this.canvas = el("canvas", {tabindex: 0, role: "img", "aria-label": "timeline of all ranks; arrow keys move, plus and minus zoom, 0 shows all"});
    this.selection = null;
    this.pointers = new Map();
    let top = RULER + (this.counters.length ? HUB + GAP : 0);
    for (const row of this.rows) { row.top = top; top += STRIP + row.tracks.length * (TRACK + 2) + GAP; }
    this.height = top + 2;
    this.listen();
    drawToWidth(this.canvas, width => { this.width = width; this.draw(); });
  }

  // ------------------------------------------------------------ looking around

  // Start-up can be longer than all the rest of a short run, and is out of sight then, to the left.
  workBegins() {
    const ends = this.rows.map(({accounts}) => {
      const n = accounts.end.findIndex((end, m) => end - accounts.begin[m] > 0 && accounts.account[accounts.first[m]] !== CODE.startup && accounts.account[accounts.first[m]] !== CODE.unbooked);
      return n < 0 ? 0 : accounts.begin[n];
    });
    const begin = Math.min(...ends, this.length);
    return begin > 0.15 * this.length && begin < 0.98 * this.length ? begin - 0.02 * (this.length - begin) : 0;
  }

  get left() { return this.width < 600 ? 86 : 138; }
  x(time) { return this.left + (this.width - this.left) * (time - this.from) / (this.to - this.from); }
  time(x) { return this.from + (this.to - this.from) * (x - this.left) / Math.max(1, this.width - this.left); }

  show(from, to) {
    const length = Math.min(this.length, Math.max(20, to - from));
    const middle = (from + to) / 2;
    this.from = Math.max(0, Math.min(this.length - length, middle - length / 2));
    this.to = this.from + length;
    hideTooltip();
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }
  zoom(factor, time = (this.from + this.to) / 2) { this.show(time - (time - this.from) / factor, time + (this.to - time) / factor); }
  move(share) { const by = share * (this.to - this.from); this.show(this.from + by, this.to + by); }
  all() { this.show(0, this.length); }

  listen() {
    const canvas = this.canvas, at = event => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 200), this.time(at(event)));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) this.move((event.deltaX || event.deltaY) / this.width);
      else return;
      event.preventDefault();
    }, {passive: false});
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, at(event));
      if (event.pointerType === "mouse" && event.button === 0 && !event.shiftKey) this.selection = [at(event), at(event)];
    });
    canvas.addEventListener("pointermove", event => this.pointerMoved(event, at(event)));
    const release = event => {
      const [begin, end] = this.selection || [0, 0];
      this.pointers.delete(event.pointerId);
      this.selection = null;
      if (Math.abs(end - begin) > 4) this.show(this.time(Math.max(this.left, Math.min(begin, end))), this.time(Math.max(begin, end)));
      else this.draw();
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("keydown", event => {
      const act = {ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => this.zoom(2), "=": () => this.zoom(2), "-": () => this.zoom(0.5), 0: () => this.all()}[event.key];
      if (act) { act(); event.preventDefault(); }
    });
  }

  pointerMoved(event, x) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) { this.hover(event, x); return; }
    if (this.selection) {
      this.selection[1] = Math.max(this.left, Math.min(this.width, x));
      this.draw();
      return;
    }
    const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(pair => pair[1]);
    this.pointers.set(event.pointerId, x);
    if (other === undefined) this.move((before - x) / (this.width - this.left));
    else this.zoom(Math.max(0.2, Math.min(5, Math.abs(x - other) / Math.max(1, Math.abs(before - other)))), this.time((x + other) / 2));
  }

  // ------------------------------------------------------------ drawing

  draw() {
    if (!this.width) return;
    const ratio = Math.min(3, devicePixelRatio || 1), canvas = this.canvas;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    canvas.style.setProperty("height", `${this.height}px`);
    const context = this.context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    this.drawn = 0;
    this.drawRuler();
    if (this.counters.length) this.drawCounters();
    for (const row of this.rows) this.drawRow(row);
    if (this.selection) {
      const [begin, end] = this.selection;
      context.fillStyle = colours.shade;
      context.fillRect(Math.min(begin, end), 0, Math.abs(end - begin), this.height);
    }
    Object.assign(canvas.dataset, {drawn: this.drawn, from: this.from, to: this.to});
  }

  drawRuler() {
    const context = this.context;
    context.textAlign = "center";
    const times = timeTicks(this.from, this.to, (this.width - this.left) / 95);
    for (const time of times) {
      const x = this.x(time);
      context.fillStyle = colours.grid;
      context.fillRect(x, RULER - 6, 1, this.height - RULER + 6);
      context.fillStyle = colours.soft;
      if (x < this.width - 24 && x > this.left + 8) context.fillText(clockTime(time, times[1] - times[0]), x, 10);
    }
    context.fillStyle = colours.accent;
    for (const [time] of this.commits) if (time >= this.from && time <= this.to) context.fillRect(this.x(time) - 0.5, RULER - 8, 1, 6);
  }

  label(text, top, under = "") {
    const context = this.context;
    context.textAlign = "left";
    context.fillStyle = colours.text;
    context.fillText(text, 12, top + (under ? 7 : STRIP / 2), this.left - 18);
    context.fillStyle = colours.soft;
    if (under) context.fillText(under, 12, top + 22, this.left - 18);
  }

  drawCounters() {
    const context = this.context, bottom = RULER + HUB, high = Math.max(1, ...this.counters.flatMap(counter => counter.points.map(point => point[1])));
    this.label("hub", RULER, `groups, to ${high}`);
    for (const counter of this.counters) {
      context.strokeStyle = colours[counter.colour];
      context.lineWidth = 1.3;
      context.beginPath();
      let y = null;
      for (let n = Math.max(0, after(counter.times, this.from) - 1); n < counter.points.length && counter.times[n] <= this.to; n++) {
        const x = Math.max(this.left, this.x(counter.times[n]));
        if (y === null) context.moveTo(x, bottom); else context.lineTo(x, y);
        y = bottom - (HUB - 2) * counter.points[n][1] / high;
        context.lineTo(x, y);
      }
      if (y === null) continue;
      context.lineTo(this.width, y);
      context.stroke();
    }
  }

  drawRow(row) {
    const context = this.context, {accounts} = row;
    const ratio = context.canvas.width / this.width, left = Math.round(this.left * ratio), columns = context.canvas.width - left;
    const seen = new Float64Array(columns * ACCOUNTS.length), sums = new Float64Array(ACCOUNTS.length);
    const scale = columns / (this.to - this.from);
    context.save();
    context.setTransform(1, 0, 0, 1, left, 0);
    const top = Math.round(row.top * ratio), height = Math.round(STRIP * ratio);
    const first = after(accounts.end, this.from);
    for (let n = first; n < accounts.size && accounts.begin[n] < this.to; n++) {
      const begin = Math.max(0, (accounts.begin[n] - this.from) * scale), end = Math.min(columns, (accounts.end[n] - this.from) * scale);
      const from = accounts.first[n], to = accounts.first[n + 1], whole = Math.ceil(begin), stop = Math.floor(end);
      for (let m = from; m < to; m++) sums[accounts.account[m]] += (end - begin) * accounts.share[m];
      this.drawn++;
      // Whole columns are drawn at once, the rest is added up: a column may have parts of many intervals.
      const add = (column, part) => {
        for (let m = from; m < to; m++) seen[column * ACCOUNTS.length + accounts.account[m]] += part * accounts.share[m];
      };
      if (stop > whole) {
        const order = [];
        for (let m = from; m < to; m++) order.push(m);
        order.sort((one, two) => accounts.account[one] - accounts.account[two]);
        let bottom = top + height;
        for (const m of order) {
          const tall = height * accounts.share[m];
          context.fillStyle = colours[ACCOUNTS[accounts.account[m]]];
          context.fillRect(whole, bottom - tall, stop - whole, tall);
          bottom -= tall;
        }
      }
      if (stop >= whole) {
        if (whole > begin) add(whole - 1, whole - begin);
        if (end > stop && stop < columns) add(stop, end - stop);
      } else add(stop, end - begin);
    }
    this.drawColumns(seen, columns, top, height);
    context.restore();
    const inside = sums.reduce((sum, value, n) => OUTSIDE.includes(n) ? sum : sum + value, 0);
    const lost = LOST.reduce((sum, n) => sum + sums[n], 0);
    this.label(row.name, row.top, inside > 0 ? `bubble ${percent(lost / inside)}` : "");
    row.tracks.forEach((track, n) => this.drawTrack(track, row.top + STRIP + 2 + n * (TRACK + 2)));
  }

  drawColumns(seen, columns, top, height) {
    const context = this.context, many = ACCOUNTS.length;
    for (let column = 0; column < columns; column++) {
      let at = top + height;
      for (let n = 0; n < many; n++) {
        const part = seen[column * many + n];
        if (part < 0.002) continue;
        context.fillStyle = colours[ACCOUNTS[n]];
        context.fillRect(column, at - part * height, 1, part * height);
        at -= part * height;
      }
    }
  }

  drawTrack(track, top) {
    const context = this.context;
    let last = -1;
    context.fillStyle = colours.grid;
    context.fillRect(this.left, top + TRACK / 2, this.width - this.left, 1);
    for (let n = after(track.latest, this.from); n < track.size && track.begin[n] < this.to; n++) {
      const begin = Math.max(this.left, this.x(track.begin[n])), end = Math.min(this.width, this.x(track.end[n]));
      if (end < last + 0.3) continue; // under a pixel that has been drawn
      context.fillStyle = colours[track.name[n] % 8];
      context.fillRect(begin, top, Math.max(0.7, end - begin - (end - begin > 4 ? 0.7 : 0)), TRACK);
      last = Math.max(end, begin + 0.7);
      this.drawn++;
    }
  }

  // ------------------------------------------------------------ what is under the pointer

  hover(event, x) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top, time = this.time(x);
    const found = x < this.left ? null : this.at(y, time);
    if (found) showTooltip(event.clientX, event.clientY, ...found); else hideTooltip();
  }

  at(y, time) {
    const stamp = `at ${duration(time / 1e6)}`;
    if (this.counters.length && y >= RULER && y < RULER + HUB) {
      const values = this.counters.map(counter => `${counter.name} ${counter.points[after(counter.times, time) - 1]?.[1] ?? 0}`);
      return ["groups in the hub", ...values, stamp];
    }
    if (y < RULER) {
      const next = this.commits.findLast(([at]) => at <= time);
      return next ? [`version ${next[1]}`, `committed at ${duration(next[0] / 1e6)}`] : null;
    }
    const row = this.rows.find(each => y >= each.top && y < each.top + STRIP + each.tracks.length * (TRACK + 2));
    if (!row) return null;
    const place = Math.floor((y - row.top - STRIP - 1) / (TRACK + 2));
    return place < 0 ? this.accountsAt(row, time, stamp) : this.spanAt(row, row.tracks[place], time);
  }

  accountsAt(row, time, stamp) {
    const {accounts} = row, pixel = (this.to - this.from) / (this.width - this.left);
    const n = after(accounts.end, time), title = `rank ${row.rank}, ${row.name}`;
    if (n >= accounts.size || accounts.begin[n] > time + pixel) return [title, "nothing recorded", stamp];
    const sums = new Map();
    let m = Math.min(n, after(accounts.end, time - pixel / 2)), number = 0;
    const begin = accounts.begin[m];
    for (; m === n || (m < accounts.size && accounts.begin[m] < time + pixel / 2); m++, number++) {
      const length = accounts.end[m] - accounts.begin[m];
      for (let k = accounts.first[m]; k < accounts.first[m + 1]; k++) sums.set(accounts.account[k], (sums.get(accounts.account[k]) || 0) + length * accounts.share[k]);
    }
    const all = [...sums.values()].reduce((sum, value) => sum + value, 0) || 1;
    const parts = [...sums].sort((one, two) => two[1] - one[1]).map(([code, value]) => sums.size === 1 ? words(ACCOUNTS[code]) : `${words(ACCOUNTS[code])} ${percent(value / all)}`);
    return [title, ...parts, number > 1 ? `${number} intervals ${stamp}` : `for ${duration((accounts.end[m - 1] - begin) / 1e6)}, from ${duration(begin / 1e6)}`];
  }

  spanAt(row, track, time) {
    const pixel = (this.to - this.from) / (this.width - this.left);
    for (let n = after(track.latest, time - pixel); n < track.size && track.begin[n] <= time + pixel; n++) {
      if (track.end[n] < time - pixel) continue;
      const name = this.names[track.name[n]], kind = /forward|optimizer/.test(name) ? "step" : "version";
      return [`${name}${track.number[n] >= 0 ? `, ${kind} ${track.number[n]}` : ""}`, `for ${duration((track.end[n] - track.begin[n]) / 1e6)}, from ${duration(track.begin[n] / 1e6)}`, `rank ${row.rank}, ${row.name}`];
    }
    return null;
  }
}

function timelineNotes(timeline) {
  const notes = [];
  for (const row of timeline.rows) {
    if (row.grouped_ms) notes.push(`${row.name}: intervals are put together within ${duration(row.grouped_ms / 1e3)}`);
    if (row.spans_left_out) notes.push(`${row.name}: the ${count(row.spans_left_out)} shortest spans are left out`);
    if (row.lost) notes.push(`${row.name}: ${count(row.lost)} older records were not kept (observe.trace_limit)`);
    if (row.clock === "measured") notes.push(`${row.name}: clock set to the hub's within ${duration(row.error_ms / 1e3)}`);
    if (row.clock === "wall") notes.push(`${row.name}: clock not measured; placed by its time of day`);
  }
  return notes;
}

function showTimeline() {
  const starts = data.timelines;
  const choice = el("select", {"aria-label": "start of the run"}, starts.map((start, n) => el("option", {value: n, selected: n === starts.length - 1}, `start ${n + 1}, ${duration(start.length / 1e6)}`)));
  const button = (text, title, act) => el("button", {type: "button", title, "aria-label": title, on: {click: act}}, text);
  let timeline = null;
  const made = section("timeline", "Timeline", starts.length ? "drag or pinch to zoom, Ctrl and wheel too" : "", starts.length > 1 ? choice : null,
    ...(starts.length ? [button("◀", "earlier", () => timeline.move(-0.4)), button("▶", "later", () => timeline.move(0.4)), button("−", "zoom out", () => timeline.zoom(0.5)), button("+", "zoom in", () => timeline.zoom(2)), button("all", "show all", () => timeline.all())] : []));
  if (!starts.length) { made.append(el("p", {class: "soft"}, "No trace: observe.trace was off, or nothing has been written yet.")); return; }
  const key = name => el("span", {}, swatch(name), words(name));
  const panel = el("div", {class: "panel timeline"});
  made.append(panel);
  const build = () => {
    const start = starts[Number(choice.value)];
    timeline = new Timeline(start);
    const counters = timeline.counters.map(counter => el("span", {}, swatch(`series-${counter.colour}`), counter.name));
    panel.replaceChildren(
      el("div", {class: "keys"}, key("busy"), el("span", {class: "group"}, "bubble:"), BUBBLE.map(key), el("span", {class: "group"}, "else:"), ["eval", "checkpoint", "startup", "shutdown", "unbooked"].map(key), counters.length ? el("span", {class: "group"}, "hub:") : null, counters),
      timeline.canvas,
      el("div", {class: "keys below"}, el("span", {class: "group"}, "thin bars:"), timeline.names.map((name, n) => el("span", {}, swatch(`series-${n % 8}`), name)), el("span", {}, el("i", {class: "swatch tick"}), "commit")),
      el("div", {class: "below"}, "Height is share: of a producer's slots in use, and of an interval or a pixel that several accounts have. trace/trace.json has the whole trace, for Perfetto.",
        timelineNotes(start).map(note => el("div", {}, note))));
  };
  choice.addEventListener("change", build);
  build();
}
