"use strict";
// Without this script all loads are shown below each other; with it, one at a time.
const tabs = document.querySelector(".tabs");
if (tabs) {
  const buttons = [...tabs.children];
  const show = (chosen) => buttons.forEach((button) => {
    button.setAttribute("aria-selected", button === chosen);
    const panel = document.getElementById(button.dataset.panel);
    panel.hidden = button !== chosen;
    panel.querySelector("h3").hidden = true;
  });
  buttons.forEach((button) => button.addEventListener("click", () => show(button)));
  tabs.hidden = false;
  show(buttons[0]);
}

const copy = document.getElementById("copy");
if (navigator.clipboard) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById("command").textContent);
    copy.textContent = "copied";
  });
}

const data = document.getElementById("trees-data");
if (data) startGallery(JSON.parse(data.textContent));

function startGallery(requests) {
  const byId = (id) => document.getElementById(id);
  const [slider, previous, next] = ["slider", "previous", "next"].map(byId);
  let request = requests[0];
  const chips = requests.map((one) => {
    const chip = document.createElement("button");
    chip.textContent = one.name;
    chip.addEventListener("click", () => choose(one));
    byId("requests").append(chip);
    return chip;
  });
  const choose = (one) => {
    request = one;
    chips.forEach((chip, i) => chip.setAttribute("aria-selected", requests[i] === one));
    byId("question").textContent = one.question;
    byId("question").hidden = !one.question;
    slider.max = one.rounds.length - 1;
    // Begin with the round that accepted most: it shows best what a tree is for.
    step(one.rounds.reduce((best, round, i) => (round.accepted.length > one.rounds[best].accepted.length ? i : best), 0));
  };
  const step = (to) => {
    const at = Math.max(0, Math.min(to, request.rounds.length - 1));
    const round = request.rounds[at];
    slider.value = at;
    previous.disabled = at === 0;
    next.disabled = at === request.rounds.length - 1;
    byId("position").textContent = `round ${at + 1} of ${request.rounds.length}`;
    tell(byId("story"), round);
    byId("shape").textContent = describe(round);
    byId("tree").replaceChildren(draw(round));
  };
  slider.addEventListener("input", () => step(+slider.value));
  previous.addEventListener("click", () => step(+slider.value - 1));
  next.addEventListener("click", () => step(+slider.value + 1));
  byId("gallery").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || event.target === slider) return; // a slider moves by itself
    event.preventDefault();
    step(+slider.value + move);
  });
  byId("gallery").hidden = false;
  choose(request);
}

function tell(place, round) {
  place.replaceChildren(round.text);
  round.new.forEach((token, i) => {
    const mark = document.createElement("mark");
    mark.textContent = token;
    if (i === round.new.length - 1) mark.className = "bonus";
    place.append(mark);
  });
  place.scrollTop = place.scrollHeight;
}

function describe(round) {
  const layers = [];
  round.depths.slice(1).forEach((depth) => (layers[depth - 1] = (layers[depth - 1] || 0) + 1));
  const accepted = round.accepted.length - 1;
  const drafted = round.degraded ? "Nothing drafted: the draft's scores were not finite" : `Layers of ${layers.join(", ")} nodes`;
  return `${drafted}. ${accepted} drafted ${accepted === 1 ? "token" : "tokens"} accepted, and the target's own token.`;
}

// Columns are depths, as wide as their longest token; every leaf has a row, and a parent stands in the row of its first child.
function draw(round) {
  const ROW = 25, HEIGHT = 19, GAP = 26, CHAR = 7.3, PAD = 6;
  const bonus = round.names.length - 1;
  const parents = [...round.parents, round.accepted.at(-1)];
  const depths = [...round.depths, round.depths[round.accepted.at(-1)] + 1];
  const on = new Set([...round.accepted, bonus]);
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const rank = (node) => (node === bonus ? 1000 : on.has(node) ? 500 : round.p[node]);
  children.forEach((nodes) => nodes.sort((a, b) => rank(b) - rank(a)));
  const chance = (node) => (node === 0 || node === bonus ? "" : round.p[node] >= 0.5 ? String(Math.round(round.p[node])) : "<1");
  const width = (node) => (round.names[node].length + (chance(node) ? chance(node).length + 1 : 0)) * CHAR + 2 * PAD;
  const rows = [];
  let free = 0;
  const place = (node) => {
    children[node].forEach(place);
    rows[node] = children[node].length ? rows[children[node][0]] : free++;
  };
  place(0);
  const left = [];
  for (let depth = 0, x = 2; depth <= Math.max(...depths); depth++) {
    left[depth] = x;
    x += Math.max(...depths.map((at, node) => (at === depth ? width(node) : 0))) + GAP;
    left[depth + 1] = x;
  }
  const svg = element("svg", { width: left.at(-1), height: free * ROW + 4, role: "img", "aria-label": "draft tree" });
  const middle = (node) => rows[node] * ROW + ROW / 2;
  const kind = (node) => (on.has(node) ? "on" : "") + (node === bonus ? " bonus" : "");
  const edges = parents.map((parent, node) => ({ parent, node })).filter(({ parent }) => parent >= 0);
  for (const { parent, node } of edges.sort((a, b) => on.has(a.node) - on.has(b.node))) {
    const from = left[depths[parent]] + width(parent), to = left[depths[node]], bend = to - GAP / 2;
    svg.append(element("path", { class: kind(node), d: `M${from} ${middle(parent)}H${bend}V${middle(node)}H${to}` }));
  }
  parents.forEach((_, node) => {
    const group = element("g", { class: kind(node), transform: `translate(${left[depths[node]]} ${middle(node)})` });
    group.append(element("rect", { y: -HEIGHT / 2, width: width(node), height: HEIGHT, rx: 4 }));
    const label = element("text", { x: PAD, y: 4, "xml:space": "preserve" });
    label.textContent = round.names[node];
    group.append(label);
    if (chance(node)) {
      const p = element("text", { class: "p", x: width(node) - PAD, y: 4, "text-anchor": "end" });
      p.textContent = chance(node);
      group.append(p);
    }
    svg.append(group);
  });
  return svg;
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  return made;
}
