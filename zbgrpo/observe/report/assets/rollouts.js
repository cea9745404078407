"use strict";
// What the model has written, exactly, except that what cannot be seen is made visible.

// Control characters, and those that turn the direction of text around, could make a text look like another one.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    character => character === "\r" ? "␍" : `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const verdict = response => response.answer == null ? "" : response.answer > 0 ? "right" : "wrong";

function showRollouts() {
  const {groups, num_files, num_shown, folder} = data.rollouts;
  const steps = [...new Set(groups.map(group => group.step))];
  const about = groups.length ? `${num_shown} of ${num_files} sampled steps` : "";
  const choice = el("select", {"aria-label": "step"}, el("option", {value: ""}, "all steps"), steps.map(step => el("option", {value: step}, `step ${step}`)));
  const made = section("rollouts", "Rollouts", about, ...(steps.length > 1 ? [choice] : []));
  if (!groups.length) { made.append(el("p", {class: "soft"}, `No sampled rollouts in ${folder}.`)); return; }
  const shown = groups.map((group, n) => [group.step, rollout(group, n === 0)]);
  choice.addEventListener("change", () => shown.forEach(([step, element]) => { element.hidden = choice.value !== "" && String(step) !== choice.value; }));
  made.append(el("div", {class: "panel"}, shown.map(([, element]) => element)));
}

function rollout(group, open) {
  const right = group.responses.filter(response => verdict(response) === "right").length;
  const details = el("details", {class: "rollout", open},
    el("summary", {}, el("b", {}, `step ${group.step}`), el("span", {class: "mono soft"}, group.uid),
      el("span", {class: "dots", role: "img", "aria-label": `${right} of ${group.responses.length} right`}, group.responses.map(response => el("i", {class: verdict(response)}))),
      el("span", {class: "preview"}, visible(group.prompt.trim().split("\n").at(-1) || ""))));
  const build = () => {
    if (details.childElementCount > 1) return;
    details.append(el("div", {}, el("p", {class: "caption"}, "prompt"), text(group.prompt, group.prompt_cut),
      group.responses.map(response),
      group.num_responses > group.responses.length ? el("p", {class: "caption"}, `and ${group.num_responses - group.responses.length} more responses`) : null));
  };
  if (open) build();
  details.addEventListener("toggle", build);
  return details;
}

function response(each, n) {
  const facts = [["reward", number(each.reward)], ["advantage", number(each.advantage)], ["answer", number(each.answer)],
    ["format", number(each.format)], ["tokens", count(each.tokens)], ["ended by", each.finish], ["version", versions(each)]];
  return el("div", {class: `response ${verdict(each)}`},
    el("div", {class: "about"}, el("span", {}, `${n + 1}`), facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value)))),
    text(each.text, each.cut));
}

// "3", or "3, 4 from token 120" for a response that new weights have reached.
const versions = each => each.versions.map(([start, version]) => start ? `${version} from token ${start}` : `${version}`).join(", ") || NONE;

const text = (written, cut) => [el("pre", {}, visible(written)), cut ? el("p", {class: "caption"}, `${count(cut)} more characters`) : null];
