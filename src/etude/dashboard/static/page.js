"use strict";
// Tooltips, the two switches and the theme. Text from the run is only ever set as textContent.
const root = document.documentElement;
const tip = document.getElementById("tip");

function element(tag, text, className) {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

function showTip(x, y, rows, head) {
  tip.replaceChildren();
  if (head) tip.append(element("b", head));
  for (const [name, value] of rows) {
    const row = document.createElement("div");
    row.append(element("span", name), element("b", value));
    tip.append(row);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, y + 16 + box.height > innerHeight ? y - 12 - box.height : y + 16) + "px";
}

function hideTip() {
  tip.hidden = true;
  for (const cross of document.querySelectorAll(".cross")) cross.style.visibility = "hidden";
}

const parsed = new WeakMap();
function chartTip(area, event) {
  if (!parsed.has(area)) parsed.set(area, JSON.parse(area.dataset.tips));
  const tips = parsed.get(area);
  const box = area.getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width;
  let nearest = 0;
  tips.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(tips.x[nearest] - at)) nearest = i; });
  const cross = area.querySelector(".cross");
  cross.style.left = 100 * tips.x[nearest] + "%";
  cross.style.visibility = "visible";
  const rows = tips.s.map((s) => [s.n, s.v[nearest]]).filter(([, value]) => value !== "");
  showTip(event.clientX, event.clientY, rows, tips.l[nearest]);
}

function tokenTip(token, event) {
  const turn = token.parentElement.dataset;
  const logprob = Number(token.dataset.l);
  const rows = [["log-probability", token.dataset.l], ["probability", (100 * Math.exp(logprob)).toPrecision(3) + " %"]];
  rows.push(["weight version", "v" + (token.dataset.v ?? turn.v)]);
  const advantage = token.dataset.a ?? turn.a;
  if (advantage !== undefined) rows.push(["advantage", advantage]);
  showTip(event.clientX, event.clientY, rows, JSON.stringify(token.textContent));
}

function onPointer(event) {
  const target = event.target instanceof Element ? event.target : null;
  const area = target?.closest(".area");
  const token = target?.closest(".k");
  hideTip();
  if (area) chartTip(area, event);
  else if (token) tokenTip(token, event);
}
addEventListener("pointermove", onPointer, { passive: true });
addEventListener("pointerdown", onPointer, { passive: true });
addEventListener("scroll", hideTip, { passive: true, capture: true });
document.addEventListener("pointerleave", hideTip);

function mark(buttons, isOn) {
  for (const button of buttons) {
    button.classList.toggle("on", isOn(button));
    button.setAttribute("aria-pressed", String(isOn(button)));
  }
}

const axes = document.querySelectorAll("[data-set-x]");
function setAxis(x) {
  root.dataset.x = x;
  mark(axes, (button) => button.dataset.setX === x);
}
for (const button of axes) button.addEventListener("click", () => setAxis(button.dataset.setX));
setAxis("step");

const filters = document.querySelectorAll("[data-filter]");
function setFilter(filter) {
  for (const card of document.querySelectorAll(".episode")) {
    const passed = card.dataset.passed === "1" ? "passed" : "failed";
    card.hidden = filter !== "all" && filter !== passed && filter !== card.dataset.stage;
  }
  mark(filters, (button) => button.dataset.filter === filter);
}
for (const button of filters) button.addEventListener("click", () => setFilter(button.dataset.filter));
if (filters.length) setFilter("all");

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
