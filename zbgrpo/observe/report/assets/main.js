"use strict";
// The order of the page.

function showHead() {
  const {project, state, description, headline, notes, log_dir} = data;
  document.getElementById("head").append(
    el("div", {class: "top"}, el("h1", {}, visible(project)), el("span", {class: `badge ${state.kind}`}, visible(state.text))),
    el("div", {class: "facts"}, description.map(text => el("span", {}, visible(text)))),
    el("div", {class: "cards"}, headline.map(card => el("div", {class: "card"},
      el("div", {class: "label"}, visible(card.label)), el("div", {class: "value"}, card.value), el("div", {class: "note"}, card.note)))),
    ...(notes.length ? [el("ul", {class: "panel notes"}, notes.map(note => el("li", {}, visible(note))))] : []));
  document.getElementById("main").append(el("nav", {id: "links", "aria-label": "parts of this page"}));
  document.title = `${project} - zbgrpo`;
  return el("footer", {}, `zbgrpo report ${log_dir}`);
}

const footer = showHead();
showCurves();
showTimeline();
showTimes();
showGroups();
showRollouts();
showSettings();
document.getElementById("main").append(footer);
document.documentElement.dataset.ready = "yes";
