"use strict";
// Time by rank, groups, lags, settings.

const cell = (value, attributes = {}) => el("td", {class: "number", ...attributes}, value);
const table = (heads, rows) => el("div", {class: "scroll"}, el("table", {},
  el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", {class: n ? "number" : ""}, head)))), el("tbody", {}, rows)));

function strip(shares) {
  const parts = Object.entries(shares).filter(([, share]) => share > 0);
  const text = parts.map(([name, share]) => `${words(name)} ${percent(share)}`).join(", ");
  return el("div", {class: "strip", role: "img", "aria-label": text, title: text},
    parts.map(([name, share]) => el("i", {style: {width: `${100 * share}%`, background: `var(--${name})`}})));
}

function showTimes() {
  const {rows, source, accounts} = data.times;
  const made = section("time", "Time by rank", source);
  if (!rows.length) { made.append(el("p", {class: "soft"}, "No rank has booked any time.")); return; }
  const used = accounts.filter(name => rows.some(row => row.shares[name] > 0));
  const timed = rows.some(row => row.seconds != null);
  const heads = ["rank", "", "bubble", ...used.map(words), ...(timed ? ["seconds"] : [])];
  const body = rows.map(row => el("tr", {},
    el("td", {}, `${row.rank} `, el("span", {class: "soft"}, row.role)),
    el("td", {style: {width: "24%"}}, strip(row.shares)), cell(el("b", {}, percent(row.bubble))),
    used.map(name => cell(percent(row.shares[name]), {class: row.shares[name] ? "number" : "number zero"})),
    timed ? cell(number(row.seconds)) : null));
  made.append(el("div", {class: "panel"}, table(heads, body)));
  const marked = made.querySelectorAll("th");
  used.forEach((name, n) => marked[n + 3].prepend(swatch(name)));
}

function showGroups() {
  const {columns, rows, live, durations, starts, taken_back, dropped_by_reason} = data.groups;
  const made = section("groups", "Groups", "the responses to one prompt, from the hub's log");
  if (!rows[0] || !rows.at(-1).values[0]) { made.append(el("p", {class: "soft"}, "Nothing has been leased yet.")); return; }
  const body = rows.map((row, n) => el("tr", {class: n === rows.length - 1 ? "sum" : ""}, el("td", {}, row.name),
    row.values.map(value => cell(number(value), {class: value ? "number" : "number zero"}))));
  const lines = [];
  const alive = Object.entries(live).filter(([, number]) => number).map(([state, number]) => `${count(number)} ${state}`);
  if (alive.length) lines.push(`Under way when the log ends: ${alive.join(", ")}.`);
  if (taken_back) lines.push(`Taken back by ${starts.length - 1} ${starts.length === 2 ? "resume" : "resumes"} (from step ${starts.slice(1).map(start => start.version).join(", ")}) and generated again: ${count(taken_back)}.`);
  else if (starts.length > 1) lines.push(`Resumed from step ${starts.slice(1).map(start => start.version).join(", ")}.`);
  const reasons = Object.entries(dropped_by_reason).map(([reason, number]) => `${words(reason)} ${count(number)}`);
  if (reasons.length) lines.push(`Dropped for: ${reasons.join(", ")}.`);
  const names = {generation: "lease to arrival", buffer: "arrival to plan", training: "plan to commit"};
  const took = durations.filter(each => each.number).map(each => el("tr", {}, el("td", {}, names[each.name]),
    [each.median, each.p95, each.longest].map(value => cell(duration(value)))));
  made.append(el("div", {class: "two"},
    el("div", {class: "panel"}, table(["", ...columns], body), lines.map(line => el("p", {class: "lines"}, line)),
      took.length ? el("div", {class: "second"}, table(["how long groups take", "median", "95 %", "longest"], took)) : null),
    el("div", {class: "panel"}, el("h3", {}, "Lag of trained groups"), lagBars(data.lags))));
}

function lagBars({lags, series, max_token_lag}) {
  if (!lags.length) return el("p", {class: "soft small"}, "Nothing has been trained yet.");
  const box = el("div", {class: "bars"});
  const picture = svg("svg", {height: 190, role: "img", "aria-label": "histogram of the lag of trained groups"});
  const total = series[0].values.reduce((sum, value) => sum + value, 0);
  const high = Math.max(...series.flatMap(each => each.values)) / total;
  drawToWidth(picture, width => {
    const left = 44, bottom = 34, top = 10, room = (width - left - 6) / lags.length;
    const y = share => top + (190 - top - bottom) * (1 - share / high);
    const parts = ticks(0, high, 4).flatMap(value => [
      svg("line", {class: "gridline", x1: left, x2: width - 6, y1: y(value), y2: y(value)}),
      svg("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, percent(value, 0))]);
    const wide = Math.min(34, room * 0.4), every = Math.ceil(26 / room);
    lags.forEach((lag, n) => {
      const middle = left + room * (n + 0.5);
      series.forEach((each, m) => {
        const value = each.values[n];
        if (!value) return;
        const bar = svg("rect", {x: middle + (m - 1) * wide, y: y(value / total), width: Math.max(1, wide - 2), height: Math.max(1, y(0) - y(value / total)), rx: 2, style: {fill: `var(--series-${m})`}});
        bar.addEventListener("pointermove", event => showTooltip(event.clientX, event.clientY, `lag ${lag}, ${each.name}`, `${count(value)} groups, ${percent(value / total)}`));
        bar.addEventListener("pointerleave", hideTooltip);
        parts.push(bar);
      });
      if (n % every === 0) parts.push(svg("text", {x: middle, y: 190 - bottom + 15, "text-anchor": "middle"}, lag));
    });
    parts.push(svg("line", {class: "axis", x1: left, x2: width - 6, y1: y(0), y2: y(0)}));
    parts.push(svg("text", {x: left + (width - left) / 2, y: 186, "text-anchor": "middle"}, "versions between sampling and training"));
    picture.replaceChildren(...parts);
  });
  box.append(el("div", {class: "legend"}, series.map((each, n) => el("span", {}, swatch(`series-${n}`), each.name))), picture,
    el("p", {class: "small soft"}, `A token that lags more than ${max_token_lag} is left out of the loss.`));
  return box;
}

function showSettings() {
  const only = el("input", {type: "checkbox"}), search = el("input", {type: "search", placeholder: "search", "aria-label": "search settings"});
  const made = section("settings", "Configuration", "blue: not the default", search, el("label", {class: "check"}, only, "only those"));
  const entries = [];
  const panels = data.settings.map(part => {
    const list = el("dl", {});
    const panel = el("div", {class: "panel"}, el("h3", {}, part.name), list);
    for (const row of part.rows) {
      const name = el("dt", {}, row.name);
      const value = el("dd", {class: "default" in row ? "changed" : "", title: "default" in row ? `default: ${row.default}` : ""}, visible(row.value));
      list.append(name, value);
      entries.push({panel, name, value, changed: "default" in row, text: `${part.name}.${row.name} ${row.value}`.toLowerCase()});
    }
    return panel;
  });
  const filter = () => {
    for (const panel of panels) panel.hidden = true;
    for (const entry of entries) {
      const shown = (!only.checked || entry.changed) && entry.text.includes(search.value.toLowerCase());
      entry.name.hidden = entry.value.hidden = !shown;
      if (shown) entry.panel.hidden = false;
    }
  };
  only.addEventListener("change", filter);
  search.addEventListener("input", filter);
  made.append(el("div", {class: "settings"}, panels),
    el("details", {class: "panel"}, el("summary", {class: "small"}, "config.yaml"), el("pre", {}, visible(data.config))));
}
