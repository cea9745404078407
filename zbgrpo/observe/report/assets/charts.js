"use strict";
// Curves over the steps. All charts share one cursor: a step under the pointer shows its values in every chart.

const HEIGHT = 168, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 20;

class Chart {
  constructor(shared, chart) {
    Object.assign(this, {shared, chart});
    this.show = chart.percent ? value => percent(value) : number;
    this.values = chart.series.map((series, n) => ({...series, colour: `var(--series-${n})`, label: el("b")}));
    this.points = chart.points.map((points, n) => ({...points, colour: `var(--series-${n + this.values.length})`, label: el("b")}));
    const legend = [...this.values, ...this.points].map(each =>
      el("span", {}, el("i", {class: "swatch", style: {background: each.colour}}), `${each.name} `, each.label));
    this.svg = svg("svg", {height: HEIGHT, role: "img", "aria-label": chart.title, tabindex: 0});
    this.element = el("div", {class: "panel chart"},
      el("div", {class: "title"}, el("h3", {}, chart.title), chart.unit ? el("span", {class: "soft small"}, chart.unit) : null),
      el("div", {class: "legend"}, legend), this.svg);
    const at = event => this.shared.point(this.stepAt(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointermove", at);
    this.svg.addEventListener("pointerdown", at);
    this.svg.addEventListener("pointerleave", () => this.shared.point(null));
    this.svg.addEventListener("keydown", event => this.shared.key(event));
    drawToWidth(this.svg, width => this.draw(width));
  }

  get steps() { return this.shared.steps; }
  x(step) { const [low, high] = this.shared.range; return LEFT + (this.width - LEFT - RIGHT) * (step - low) / Math.max(1, high - low); }
  y(value) { return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - this.low) / (this.high - this.low)); }
  stepAt(x) {
    const [low, high] = this.shared.range;
    return low + (high - low) * (x - LEFT) / Math.max(1, this.width - LEFT - RIGHT);
  }

  scale() {
    const all = [...this.values.flatMap(each => each.values), ...this.points.flatMap(each => each.values.map(pair => pair[1]))]
      .filter(value => value != null);
    let low = Math.min(...all), high = Math.max(...all);
    if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
    const margin = (high - low) * 0.06;
    this.low = low >= 0 && low - margin < 0 ? 0 : low - margin;
    this.high = this.chart.percent && high <= 1 ? Math.min(1, high + margin) : high + margin;
    if (this.chart.percent) this.low = Math.max(0, this.low);
  }

  draw(width) {
    if (!width) return;
    this.width = width;
    this.scale();
    const parts = [];
    for (const value of ticks(this.low, this.high, 4)) {
      const y = this.y(value);
      parts.push(svg("line", {class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y}));
      parts.push(svg("text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, this.chart.percent ? percent(value, 0) : number(value)));
    }
    for (const step of ticks(...this.shared.range, width / 90).filter(Number.isInteger)) {
      parts.push(svg("text", {x: this.x(step), y: HEIGHT - 5, "text-anchor": "middle"}, count(step)));
    }
    parts.push(svg("line", {class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM}));
    const pairs = values => this.steps.map((step, n) => [step, values[n]]);
    for (const {values, colour} of this.values) {
      const smooth = this.shared.smooth ? smoothed(values) : null;
      if (smooth) parts.push(svg("path", {class: "raw", d: this.path(pairs(values)), style: {stroke: colour}}));
      parts.push(svg("path", {class: "line", d: this.path(pairs(smooth || values)), style: {stroke: colour}}));
    }
    for (const {values, colour} of this.points) {
      parts.push(svg("path", {class: "dashed", d: this.path(values), style: {stroke: colour}}));
      for (const [step, value] of values) parts.push(svg("circle", {cx: this.x(step), cy: this.y(value), r: 3, style: {fill: colour}}));
    }
    this.cursor = svg("g", {});
    this.svg.replaceChildren(...parts, this.cursor);
    this.mark();
  }

  path(pairs) {
    let text = "", pen = false;
    pairs.forEach(([step, value], n) => {
      if (value == null) { pen = false; return; }
      text += `${pen ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (!pen && pairs[n + 1]?.[1] == null) text += "h0.01"; // alone between gaps: a dot
      pen = true;
    });
    return text;
  }

  // The cursor and the values of its step; without one, the last values.
  mark() {
    const index = this.shared.index, at = index == null ? this.steps.length - 1 : index, parts = [];
    if (index != null) parts.push(svg("line", {class: "cursor", x1: this.x(this.steps[at]), x2: this.x(this.steps[at]), y1: TOP, y2: HEIGHT - BOTTOM}));
    for (const each of this.values) {
      const value = each.values[at];
      each.label.textContent = this.show(value);
      if (index != null && value != null) parts.push(svg("circle", {cx: this.x(this.steps[at]), cy: this.y(value), r: 3.5, style: {fill: each.colour}}));
    }
    for (const each of this.points) {
      const limit = index == null ? Infinity : this.steps[at];
      const before = each.values.filter(([step]) => step <= limit).at(-1);
      each.label.textContent = before ? `${this.show(before[1])} (step ${before[0]})` : NONE;
    }
    this.cursor?.replaceChildren(...parts);
  }
}

// Mean over the neighbours, a fiftieth of all steps to each side.
function smoothed(values) {
  const reach = Math.max(2, Math.round(values.length / 50));
  return values.map((value, n) => {
    if (value == null) return null;
    const near = values.slice(Math.max(0, n - reach), n + reach + 1).filter(other => other != null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

function showCurves() {
  const {steps, charts, averaged} = data.curves;
  const stepLabel = el("span", {class: "small soft"});
  const check = el("input", {type: "checkbox"});
  const about = averaged > 1 ? `a point is the mean of ${averaged} steps` : "";
  const made = section("curves", "Curves", about, stepLabel, el("label", {class: "check"}, check, "smooth"));
  if (!charts.length) { made.append(el("p", {class: "soft"}, "No step has been committed yet.")); return; }
  const evaluated = charts.flatMap(chart => chart.points.flatMap(points => points.values.map(pair => pair[0])));
  const shared = {
    steps, smooth: false, index: null, charts: [],
    range: [Math.min(steps[0] ?? Infinity, ...evaluated), Math.max(steps.at(-1) ?? 0, ...evaluated)],
    point(step) {
      const nearest = step == null || !steps.length ? null : steps.reduce((best, other, n) => Math.abs(other - step) < Math.abs(steps[best] - step) ? n : best, 0);
      if (nearest === this.index) return;
      this.index = nearest;
      stepLabel.textContent = nearest == null ? "" : `step ${count(steps[nearest])}`;
      this.charts.forEach(chart => chart.mark());
    },
    key(event) {
      const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!by) return;
      event.preventDefault();
      const at = Math.min(steps.length - 1, Math.max(0, (this.index ?? steps.length - 1) + by));
      this.point(steps[at]);
    },
  };
  shared.charts = charts.map(chart => new Chart(shared, chart));
  check.addEventListener("change", () => { shared.smooth = check.checked; shared.charts.forEach(chart => chart.draw(chart.width)); });
  made.append(el("div", {class: "grid"}, shared.charts.map(chart => chart.element)));
}
