// The page: one run, or several side by side.
import { takeToken } from "./breaking.js";
import { Chart } from "./charts.js";
import { Run, connect, follow } from "./model.js";
import { DASHES, STATE_COLOURS, STATES, TONES, colour, counted, known, make, percent, prepare, span, swatch } from "./words.js";
import { View, measuresIn, nameOf, stateOf, tellerOf } from "./view.js";

const content = document.getElementById("content"), tabs = document.getElementById("tabs"), connection = document.getElementById("connection");
const MOST_DRAWN = 2 * TONES.length; // of more runs the charts show the first ones until others are chosen
const runs = [], ticked = new Map(); // number of a run -> whether the charts show it
let shown = null;

// The shortest names by which all runs can be told apart.
function namesOf(runs) {
  const forms = [(about) => about.name, (about) => `${about.name} · seed ${about.seed}`, (about) => about.directory.split("/").slice(-2).join("/"),
    (about) => about.directory.split("/").slice(-3).join("/"), (about) => about.directory];
  return forms.map((form) => runs.map((run) => form(run.about))).find((names) => new Set(names).size === runs.length) || runs.map((run) => run.about.directory);
}

function connected() {
  const lost = runs.filter((run) => !run.connected).length;
  connection.textContent = lost ? "connection lost, trying again" : "live";
  connection.className = `pill ${lost ? "bad" : "good"}`;
  document.body.dataset.connected = String(!lost);
}

function open(number) {
  shown?.close();
  document.title = number === null ? "fedemu: several runs" : `${runs[number].about.name} · fedemu`;
  for (const tab of tabs.children) tab.setAttribute("aria-current", String(tab.dataset.run === String(number)));
  shown = number === null ? new SideBySide(runs, content) : new View(runs[number], content);
  history.replaceState(null, "", runs.length > 1 ? (number === null ? "#all" : `#run=${number}`) : location.pathname);
}

class SideBySide {
  constructor(runs, place) {
    this.runs = runs;
    this.names = namesOf(runs);
    this.charts = [];
    this.chosen = [];
    this.columns = []; // the measures of methods' own that have a chart
    this.cards = runs.map((run, number) => new Card(run, this.names[number], ticked.get(number) ?? number < MOST_DRAWN, () => open(number), () => this.choose()));
    this.place = make("div", { class: "charts" });
    place.replaceChildren(make("h1", {}, counted(runs.length, "run")), make("p", { class: "sub" }, "A click on a name shows the run. The charts below show those that are ticked."),
      make("div", { class: "side" }, ...this.cards.map((card) => card.element)), this.place);
    this.choose();
    this.stops = runs.map((run) => follow(run, (changed) => this.draw(run, changed)));
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => { for (const chart of this.charts) chart.restyle(); for (const card of this.cards) card.draw(); };
    this.scheme.addEventListener("change", this.recolour);
  }

  // Makes the charts of the runs that are ticked.
  choose() {
    this.cards.forEach((card, number) => ticked.set(number, card.box.checked));
    const chosen = (this.chosen = this.runs.filter((run, number) => this.cards[number].box.checked));
    const look = (place) => [TONES[place % TONES.length], DASHES[Math.floor(place / TONES.length) % DASHES.length]];
    this.cards.forEach((card) => card.mark(...(card.box.checked ? look(chosen.indexOf(card.run)) : ["line"])));
    const lines = (value) => chosen.map((run, place) => {
      const [tone, dash] = look(place);
      return [this.names[run.about.number], tone, (row) => value(row[run.about.number]), dash];
    });
    this.columns = this.measures();
    for (const chart of this.charts) chart.close();
    this.place.replaceChildren();
    this.charts = [
      ...[["Accuracy", "share", "accuracy"], ["Loss", "plain", "loss"], ["Forgetting, F", "share", "forgetting"]].map(([title, form, column]) => [title, form, (row) => row?.[column]]),
      ...this.columns.map((column) => [`${nameOf(column)} (${tellerOf(column)})`, "plain", (row) => row?.own[column]]),
    ].map(([title, form, value]) => new Chart(this.place, title, form, lines(value)));
    this.chart();
  }

  measures() {
    return measuresIn(this.chosen.flatMap((run) => run.rows));
  }

  close() {
    for (const stop of this.stops) stop();
    this.scheme.removeEventListener("change", this.recolour);
    for (const chart of this.charts) chart.close();
  }

  draw(run, changed) {
    this.cards[run.about.number].draw();
    if (changed.has("rows")) this.chart();
  }

  chart() {
    if (this.measures().join("\n") !== this.columns.join("\n")) return this.choose();
    const joined = new Map();
    this.runs.forEach((one, number) => one.rows.forEach((row) => joined.set(row.round, { ...joined.get(row.round), round: row.round, [number]: row })));
    const rows = [...joined.values()].sort((a, b) => a.round - b.round);
    for (const chart of this.charts) chart.draw(rows);
  }
}

class Card {
  constructor(run, title, drawn, select, choose) {
    this.run = run;
    this.box = make("input", { type: "checkbox", onchange: choose, "aria-label": `${title} in the charts` });
    this.box.checked = drawn;
    this.swatch = make("span");
    this.state = make("span", { class: "pill" });
    this.line = make("p", { class: "line" });
    this.canvas = make("canvas", { role: "img" });
    this.figure = make("b");
    const name = make("button", { type: "button", class: "ask", onclick: select }, title), where = run.about.directory.split("/").slice(-2).join("/");
    this.element = make("section", { class: "panel" }, make("h2", {}, this.swatch, name), make("p", { class: "sub" }, this.state, " ", make("code", {}, where)),
      make("p", { class: "line" }, make("label", {}, this.box, " in the charts")), this.line, make("div", { class: "canvas" }, this.canvas));
  }

  mark(tone, dash) {
    this.swatch.replaceChildren(swatch(tone, dash));
  }

  draw() {
    const { run } = this, { status, about } = run, [word, tone] = stateOf(run);
    if (!run.ready) return;
    this.state.textContent = word;
    this.state.className = `pill ${tone}`;
    const accuracy = run.rows.findLast((row) => known(row.accuracy))?.accuracy;
    this.line.textContent = `round ${status.round || 0} of ${about.rounds} · accuracy ${percent(accuracy)} · ${span(status.virtual_time ?? 0)}`;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const cell = Math.max(1, Math.min(10, Math.floor(Math.sqrt((width * 110) / about.devices)))), columns = Math.floor(width / cell);
    const context = prepare(this.canvas, width, Math.max(cell, Math.ceil(about.devices / columns) * cell));
    const colours = STATE_COLOURS.map(colour), counts = new Array(8).fill(0);
    run.states.forEach((state, device) => {
      counts[state] += 1;
      context.fillStyle = colours[state];
      context.fillRect((device % columns) * cell, Math.floor(device / columns) * cell, cell > 3 ? cell - 1 : cell, cell > 3 ? cell - 1 : cell);
    });
    this.canvas.setAttribute("aria-label", `Devices: ${STATES.map((name, state) => counts[state] && `${counts[state]} ${name}`).filter(Boolean).join(", ")}.`);
  }
}

function showTabs() {
  tabs.hidden = runs.length < 2;
  tabs.replaceChildren(make("button", { type: "button", "data-run": "null", onclick: () => open(null) }, "All"),
    ...namesOf(runs).map((name, number) => make("button", { type: "button", "data-run": number, onclick: () => open(number) }, name)));
}

function add(about) {
  const run = new Run(about);
  run.addEventListener("change", (event) => event.detail.has("connection") && connected());
  runs.push(run);
  return run;
}

// A run has begun since. Who looks at one run goes on to do so.
function arrive(about) {
  add(about).connection(true);
  const current = shown instanceof SideBySide ? null : shown.run.about.number;
  showTabs();
  if (current === null) open(null);
  else for (const tab of tabs.children) tab.setAttribute("aria-current", String(tab.dataset.run === String(current)));
}

async function begin() {
  takeToken();
  let list = null;
  while (list === null) {
    try {
      list = await (await fetch("/api/runs")).json();
    } catch {
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
  list.forEach(add);
  showTabs();
  const named = /run=(\d+)/.exec(location.hash);
  open(runs.length === 1 ? 0 : named && Number(named[1]) < runs.length ? Number(named[1]) : null);
  connect(runs, arrive);
  window.fedemu = { runs, frames: () => runs.reduce((sum, run) => sum + run.frames, 0) };
}

// An address with the token of a server that was started again, or of another run, was opened in this tab.
addEventListener("hashchange", () => /^#(token|run)=/.test(location.hash) && location.reload());

begin();
