// The page: one run, or several side by side.
import { takeToken } from "./breaking.js";
import { Chart } from "./charts.js";
import { Run, follow } from "./model.js";
import { STATE_COLOURS, STATES, colour, counted, known, make, percent, prepare, span, swatch } from "./words.js";
import { View, stateOf } from "./view.js";

const content = document.getElementById("content"), tabs = document.getElementById("tabs"), connection = document.getElementById("connection");
const TONES = ["blue", "orange", "green", "red", "purple", "sky", "slate"];
let runs = [], shown = null;

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
    this.cards = runs.map((run, number) => new Card(run, TONES[number % TONES.length], () => open(number)));
    const charts = make("div", { class: "charts" });
    place.replaceChildren(make("h1", {}, counted(runs.length, "run")), make("p", { class: "sub" }, "A click on a name shows the run."),
      make("div", { class: "side" }, ...this.cards.map((card) => card.element)), charts);
    const lines = (name) => runs.map((run, number) => [run.about.name === runs[0].about.name ? shortName(run) : run.about.name, TONES[number % TONES.length], (row) => row[number]?.[name]]);
    this.charts = [new Chart(charts, "Accuracy", "share", lines("accuracy")), new Chart(charts, "Loss", "plain", lines("loss")), new Chart(charts, "Forgetting, F", "share", lines("forgetting"))];
    this.runs = runs;
    this.stops = runs.map((run) => follow(run, (changed) => this.draw(run, changed)));
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => { for (const chart of this.charts) chart.restyle(); for (const card of this.cards) card.draw(); };
    this.scheme.addEventListener("change", this.recolour);
  }

  close() {
    for (const stop of this.stops) stop();
    this.scheme.removeEventListener("change", this.recolour);
  }

  draw(run, changed) {
    this.cards[run.about.number].draw();
    if (!changed.has("rows")) return;
    const joined = new Map();
    this.runs.forEach((one, number) => one.rows.forEach((row) => joined.set(row.round, { ...joined.get(row.round), round: row.round, [number]: row })));
    const rows = [...joined.values()].sort((a, b) => a.round - b.round);
    for (const chart of this.charts) chart.draw(rows);
  }
}

function shortName(run) {
  return run.about.directory.split("/").slice(-2).join("/");
}

class Card {
  constructor(run, tone, select) {
    this.run = run;
    this.state = make("span", { class: "pill" });
    this.line = make("p", { class: "line" });
    this.canvas = make("canvas", { role: "img" });
    this.figure = make("b");
    const name = make("button", { type: "button", class: "ask", onclick: select }, run.about.name);
    this.element = make("section", { class: "panel" }, make("h2", {}, swatch(tone), name), make("p", { class: "sub" }, this.state, " ", make("code", {}, shortName(run))), this.line, make("div", { class: "canvas" }, this.canvas));
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
  runs = list.map((about) => new Run(about));
  for (const run of runs) run.addEventListener("change", (event) => event.detail.has("connection") && connected());
  if (runs.length > 1) {
    tabs.hidden = false;
    tabs.append(make("button", { type: "button", "data-run": "null", onclick: () => open(null) }, "All"),
      ...runs.map((run, number) => make("button", { type: "button", "data-run": number, onclick: () => open(number) }, run.about.name === runs[0].about.name ? shortName(run) : run.about.name)));
  }
  const named = /run=(\d+)/.exec(location.hash);
  open(runs.length === 1 ? 0 : named && Number(named[1]) < runs.length ? Number(named[1]) : null);
  window.fedemu = { runs, frames: () => runs.reduce((sum, run) => sum + run.frames, 0) };
}

begin();
