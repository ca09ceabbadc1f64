// The view of one run: all parts of the page, each drawn again when its part of the run has changed.
import { Asks } from "./asks.js";
import { Breaking } from "./breaking.js";
import { Chart, Heat } from "./charts.js";
import { Field } from "./field.js";
import { Log } from "./log.js";
import { follow } from "./model.js";
import { Story } from "./story.js";
import { DASHES, TONES, bytes, counted, decimal, known, make, percent, rate, span } from "./words.js";

const WORDS = {
  starting: ["starting", "busy"], running: ["running", "busy"], waiting: ["waiting for devices", "busy"], resuming: ["starting again", "busy"], completed: ["completed", "good"], stopped: ["stopped", "bad"],
  interrupted: ["interrupted", "bad"], diverged: ["diverged", "bad"], quorum: ["ended: no quorum", "bad"], failed: ["failed", "bad"], gone: ["the folder is gone", "bad"],
};
const shares = (u, low, high) => (low === null ? [0, 1] : [Math.max(0, Math.floor(low * 20 - 0.2) / 20), Math.min(1.001, Math.ceil(high * 20 + 0.2) / 20)]);
// Forgetting is below 0 where a model is better than ever.
export const fromZero = (u, low, high) => [low < 0 ? low * 1.1 : 0, high > 0 ? high * 1.1 : low < 0 ? 0 : 1];

// The columns of the measures of a method's own that are drawn: the first ones by name, as in reports.
const MOST_MEASURES = 8;
export const nameOf = (column) => column.slice(column.indexOf(".") + 1);
export const tellerOf = (column) => (column.startsWith("remarks.") ? "told by the method" : "mean of the accepted devices");
export function measuresIn(rows) {
  const order = (column) => `${nameOf(column)}\0${column}`;
  return [...new Set(rows.flatMap((row) => Object.keys(row.own)))].sort((a, b) => (order(a) < order(b) ? -1 : 1)).slice(0, MOST_MEASURES);
}

export function stateOf(run) {
  return WORDS[run.status.state] || [run.status.state || "…", ""];
}

export class View {
  constructor(run, place) {
    this.run = run;
    place.replaceChildren(document.getElementById("run").content.cloneNode(true));
    const parts = (this.parts = Object.fromEntries([...place.querySelectorAll("[data-part]")].map((element) => [element.dataset.part, element])));
    parts.name.textContent = run.about.name;
    parts.state.textContent = "reading the logs";
    this.story = new Story(run, parts.story, place.querySelector(".columns"));
    this.field = new Field(run, parts, (devices) => this.breaking.chosen(devices));
    this.field.tell = (device) => this.story.open(device);
    this.breaking = new Breaking(run, parts, this.field);
    this.asks = new Asks(run, parts, (device) => this.story.open(device));
    this.log = new Log(run, parts);
    this.charts = this.makeCharts();
    this.measures = new Map(); // the column of a measure -> its chart
    this.announced = 0;
    parts.settingsearch.addEventListener("input", () => this.settings());
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => { this.field.all(); this.asks.draw(); for (const chart of this.allCharts()) chart.restyle(); };
    this.scheme.addEventListener("change", this.recolour);
    this.stop = follow(run, (changed) => this.draw(changed));
  }

  close() {
    this.stop();
    this.scheme.removeEventListener("change", this.recolour);
    for (const chart of this.allCharts()) chart.close();
  }

  allCharts() {
    return [...this.charts.map(([chart]) => chart), ...this.measures.values()];
  }

  makeCharts() {
    const { model, traffic } = this.parts, value = (name) => (row) => row[name];
    const time = { x: "time", xform: "time", at: (sample) => sample.at - (this.run.machine[0]?.at ?? 0) };
    // The processes of these kinds that the samples know: all trainers and supervisors, of however many machines.
    const uses = (kinds) => (samples) => [...new Set(samples.flatMap((sample) => Object.keys(sample.used)))].filter((name) => kinds.test(name))
      .map((name, place) => [name, TONES[place % TONES.length], (sample) => sample.used[name]?.[0], DASHES[Math.floor(place / TONES.length) % DASHES.length]]);
    return [
      [new Chart(model, "Accuracy", "share", [["all classes", "blue", value("accuracy")], ["seen so far", "orange", value("seen_accuracy")]], { range: shares }), "rows"],
      [new Chart(model, "Loss", "plain", [["loss", "red", value("loss")]], {}), "rows"],
      [new Chart(model, "Forgetting", "share", [["F", "purple", value("forgetting")], ["round forgetting", "slate", value("round_forgetting")]], { range: fromZero }), "rows"],
      [new Heat(model, "Accuracy by class", "class_accuracy", "class", (label) => this.run.about.classes[label] ?? label), "rows"],
      [new Heat(model, "Accuracy by period", "period_accuracy", "period", (label) => label + 1), "rows"],
      [new Chart(traffic, "Bytes of a round, as real devices would move them", "size", [["down", "blue", value("bytes_down")], ["up", "orange", value("bytes_up")]], { range: fromZero }), "rows"],
      [new Chart(traffic, "Device updates per second of real time", "plain", [["updates/s", "green", (row) => (row.round_seconds ? row.accepted / row.round_seconds : null)]], { range: fromZero }), "rows"],
      [new Chart(traffic, "Devices", "plain", [["on-line", "green", value("online")], ["asked", "blue", value("selected")], ["accepted", "sky", value("accepted")], ["dropped", "red", value("dropped")]], { range: fromZero }), "rows"],
      [new Chart(traffic, "Real time of a round", "time", [["round", "blue", value("round_seconds")], ["coordinator", "purple", value("coordinator_seconds")], ["a device's training", "green", value("device_seconds")]], { range: fromZero }), "rows"],
      [new Chart(traffic, "Use of the trainers (shares of a core)", "share", uses(/^trainer/), { ...time, optional: true, range: fromZero }), "machine"],
      [new Chart(traffic, "Use of coordinator and supervisor (shares of a core)", "share", uses(/^(coordinator|supervisor)/), { ...time, optional: true, range: fromZero }), "machine"],
      [new Chart(traffic, "Jobs that wait for a trainer", "plain", [["waiting", "red", value("waiting")], ["busy trainers", "blue", value("busy")]], { ...time, optional: true, range: fromZero }), "machine"],
    ];
  }

  draw(changed) {
    if (!this.run.ready) return;
    if (changed.has("all")) { this.settings(); this.field.drawn = null; }
    if (changed.has("status") || changed.has("rows") || changed.has("connection")) this.head();
    if (changed.has("all") && this.run.status.state === "completed" && !this.coloured) this.parts.colouring.value = "outcome";
    this.coloured = true;
    if (changed.has("fleet") || changed.has("all")) this.field.draw();
    if (changed.has("fleet") || changed.has("visited") || changed.has("all")) this.story.again();
    if (changed.has("asks") || changed.has("status") || changed.has("all")) this.asks.draw();
    if (changed.has("events") || changed.has("all")) this.log.news();
    for (const [chart, part] of this.charts) if (changed.has(part) || changed.has("all")) chart.draw(this.run[part]);
    if (changed.has("rows")) this.drawMeasures();
  }

  drawMeasures() {
    const columns = measuresIn(this.run.rows), { own, ownbox } = this.parts;
    ownbox.hidden = !columns.length;
    for (const [column, chart] of this.measures) {
      if (columns.includes(column)) continue;
      chart.close();
      chart.figure.remove();
      this.measures.delete(column);
    }
    for (const column of columns) {
      if (this.measures.has(column)) continue;
      const tone = column.startsWith("remarks.") ? "purple" : "orange";
      this.measures.set(column, new Chart(own, nameOf(column), "plain", [[tellerOf(column), tone, (row) => row.own[column]]]));
    }
    columns.forEach((column, place) => {
      const { figure } = this.measures.get(column);
      if (own.children[place] !== figure) own.insertBefore(figure, own.children[place]);
    });
    for (const chart of this.measures.values()) chart.draw(this.run.rows);
  }

  head() {
    const { run, parts } = this, { status, about } = run, row = run.last;
    const [word, tone] = stateOf(run);
    parts.name.textContent = about.name;
    parts.state.textContent = word;
    parts.state.className = `pill ${tone}`;
    parts.where.replaceChildren(make("code", {}, about.directory), ` · seed ${about.seed} · ${counted(about.devices, "device")}`);
    const share = about.rounds ? (status.round || 0) / about.rounds : 0;
    parts.progress.firstElementChild.style.width = `${100 * share}%`;
    parts.progress.setAttribute("aria-valuemax", about.rounds);
    parts.progress.setAttribute("aria-valuenow", status.round || 0);
    const line = [`round ${status.round || 0} of ${about.rounds}`];
    if (about.periods > 1) line.push(`period ${(status.task ?? 0) + 1} of ${about.periods}`);
    if (about.virtual) line.push(`${span(status.virtual_time ?? 0)} of the experiment's time`);
    line.push(`${span(status.wall_time ?? 0)} of real time`);
    if (known(status.seconds_left) && status.round < about.rounds) line.push(`${span(status.seconds_left)} left`);
    if (status.job) line.push(`server job ${status.job.name}: ${percent(status.job.step / Math.max(1, status.job.steps), 0)}`);
    if (status.absence) {
      const { devices, away, seconds, then } = status.absence;
      const until = known(seconds) ? `, ${span(seconds)} until ${then}` : "";
      line.push(`waiting for ${counted(devices, "device")} without a connection${away ? ` (away: ${away})` : ""}${until}`);
    }
    if (status.perturbed) line.push("perturbed");
    if (status.unread) line.push(status.unread);
    parts.line.textContent = line.join(" · ");
    const accuracy = run.rows.findLast?.((one) => known(one.accuracy)) || {};
    const cards = [[percent(accuracy.accuracy), "accuracy"], [percent(status.best), "best accuracy"],
      known(accuracy.perplexity) ? [decimal(accuracy.perplexity, 2), "perplexity"] : [decimal(accuracy.loss, 4), "loss"],
      [percent(run.rows.findLast?.((one) => known(one.forgetting))?.forgetting), "F, forgotten"],
      [known(status.counts?.online ?? row.online) ? (status.counts?.online ?? row.online).toLocaleString("en") : "–", "devices on-line"],
      [(status.updates || 0).toLocaleString("en"), "device updates"], [rate(status.updates_per_second), "updates/s"],
      [bytes((row.bytes_down || 0) + (row.bytes_up || 0)), "bytes of the last round"]];
    parts.cards.replaceChildren(...cards.map(([figure, label]) => make("div", { class: "card" }, make("b", {}, figure), make("span", {}, label))));
    const unfinished = known(status.state) && !known(status.coordinator) && !["starting", "resuming", "completed", "diverged", "gone"].includes(status.state);
    parts.banner.hidden = !unfinished;
    if (unfinished) {
      const failed = status.failure ? `The run could not go on: ${status.failure}. ` : "";
      parts["banner-text"].textContent = `${failed}No coordinator is at work here. The run stands after round ${status.round || 0} of ${about.rounds}; this command goes on with it:`;
      parts.command.textContent = status.resume || "";
    }
    this.breaking.able();
    const now = Date.now();
    if (now - this.announced > 15000 || this.word !== word) {
      this.announced = now;
      this.word = word;
      document.getElementById("announcer").textContent = `${about.name}: ${word}, round ${status.round || 0} of ${about.rounds}, accuracy ${percent(accuracy.accuracy)}`;
    }
  }

  settings() {
    const text = this.parts.settingsearch.value.trim().toLowerCase();
    this.parts.settings.replaceChildren(...this.run.settings.filter((pair) => !text || pair.join(" ").toLowerCase().includes(text))
      .map(([key, value]) => make("tr", {}, make("td", { class: "code" }, key), make("td", { class: "code" }, value))));
  }
}
