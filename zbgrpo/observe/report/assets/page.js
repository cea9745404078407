"use strict";
// Common parts: the data, making elements, numbers for people, the tooltip. Text only ever enters the page as text.

const data = JSON.parse(document.getElementById("data").textContent);
const ACCOUNTS = data.times.accounts;
const BUBBLE = ["starved", "blocked_on_weights", "imbalance"];
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "on") for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null) element.append(child);
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function section(id, title, about, ...controls) {
  const heading = el("div", {class: "heading"}, el("h2", {}, title), about ? el("span", {class: "soft small"}, about) : null,
    controls.length ? el("span", {class: "controls"}, controls) : null);
  const made = el("section", {id}, heading);
  document.getElementById("main").append(made);
  document.getElementById("links").append(el("a", {href: `#${id}`}, title));
  return made;
}

// ---------------------------------------------------------------- numbers

const NONE = "–";
function number(value) {
  if (value == null) return NONE;
  const size = Math.abs(value);
  if (size >= 999.5) {
    const [factor, unit] = size >= 999.5e6 ? [1e9, "G"] : size >= 999.5e3 ? [1e6, "M"] : [1e3, "k"];
    return (Number.isInteger(value) && size < 10000) ? value.toLocaleString("en") : `${trim((value / factor).toPrecision(3))}${unit}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value.toPrecision(3));
}
const trim = text => text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
const percent = (share, digits = 1) => share == null ? NONE : `${(100 * share).toFixed(digits)} %`;
const count = value => value.toLocaleString("en");
function duration(seconds) {
  if (seconds == null) return NONE;
  const size = Math.abs(seconds);
  if (size < 1e-3) return `${trim((seconds * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${trim((seconds * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${trim(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const two = value => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h${two(Math.floor(whole % 3600 / 60))}m${two(whole % 60)}s`;
}
const words = name => name.replaceAll("_", " ");

// Ticks at 1, 2 or 5 times a power of ten.
function ticks(low, high, about) {
  const raw = (high - low) / Math.max(1, about);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw * 0.999);
  const made = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) made.push(n * step || 0);
  return made;
}

// ---------------------------------------------------------------- colours, tooltip

let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = {};
  for (const name of [...ACCOUNTS, "text", "soft", "line", "grid", "card", "page", "accent", "shade"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (let n = 0; n < 8; n++) colours[n] = style.getPropertyValue(`--series-${n}`).trim();
}
readColours();
const recoloured = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); recoloured.forEach(draw => draw()); });
const swatch = name => el("i", {class: "swatch", style: {background: `var(--${name})`}});

const tooltip = document.getElementById("tooltip");
function showTooltip(x, y, title, ...lines) {
  tooltip.replaceChildren(el("b", {}, title), ...lines.map(line => el("div", {}, line)));
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? Math.max(4, x - 12 - box.width) : x + 16;
  const top = y + 16 + box.height > innerHeight ? Math.max(4, y - 12 - box.height) : y + 16;
  tooltip.style.setProperty("transform", `translate(${Math.round(left)}px, ${Math.round(top)}px)`);
}
function hideTooltip() { tooltip.hidden = true; }

// Draws now and whenever the width of the element changes.
function drawToWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) { width = element.clientWidth; draw(width); }
  }).observe(element);
  recoloured.push(() => draw(width));
}
