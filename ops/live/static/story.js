// The story of one device: what it holds, what it was asked and how that ended, and what it keeps.
import { LETTERS, OUTCOMES, STATES, counted, known, make, span, table } from "./words.js";
import { viridis } from "./charts.js";
import { said } from "./log.js";

// The colour of a period: the later, the lighter.
const tone = (period, periods) => viridis(periods > 1 ? 0.15 + (0.8 * period) / (periods - 1) : 0.4);

export class Story {
  constructor(run, place, columns) {
    Object.assign(this, { run, place, columns });
    this.device = null;
  }

  async open(device) {
    this.device = device;
    this.place.hidden = false;
    this.columns.classList.add("told");
    this.show(device, null, "reading …");
    try {
      const answer = await fetch(`/api/runs/${this.run.about.number}/devices/${device}`);
      const told = await answer.json();
      if (this.device === device) this.show(device, answer.ok ? told : null, told.error);
    } catch {
      if (this.device === device) this.show(device, null, "the page's server does not answer");
    }
    this.place.focus({ preventScroll: window.innerWidth > 900 });
  }

  // Says anew what the device does now, and what it has done so far.
  again() {
    if (this.device >= this.run.about.devices) this.close(); // another run has begun in this folder
    if (this.device === null) return;
    const { states, outcomes, visits } = this.run, { now, asked, last } = this.facts;
    now.textContent = STATES[states[this.device]];
    asked.textContent = counted(visits[this.device], "time");
    last.textContent = OUTCOMES[outcomes[this.device]];
  }

  close() {
    this.device = null;
    this.place.hidden = true;
    this.columns.classList.remove("told");
  }

  show(device, told, problem) {
    const close = make("button", { type: "button", onclick: () => this.close(), "aria-label": "Close the story" }, "✕");
    const parts = [make("h3", {}, `Device ${device}`, close)];
    this.facts = { now: make("span"), asked: make("span"), last: make("span") };
    this.again();
    const facts = [["now", this.facts.now], ["asked", this.facts.asked], ["last outcome", this.facts.last]];
    if (told) {
      const { seconds_per_sample: pace, down_kbps: down, up_kbps: up, latency } = told.profile;
      if (known(pace)) facts.push(["speed", `${(1000 * pace).toFixed(1)} ms a sample, ${(down / 1000).toFixed(1)} Mbit/s down, ${(up / 1000).toFixed(1)} up, ${(1000 * latency).toFixed(0)} ms latency`]);
      if (told.machine) facts.push(["process", told.machine]);
    }
    parts.push(make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
    if (problem) parts.push(make("p", { class: told ? "bad" : "hint" }, problem));
    if (told) {
      if (told.missing) parts.push(make("p", { class: "hint" }, told.missing));
      const shown = told.classes?.length, some = shown < told.class_count ? ` (the first ${shown} of ${counted(told.class_count, "class", "classes")})` : "";
      if (told.labels) parts.push(make("h4", {}, `Training samples by class${told.labels.length > 1 ? " and period" : ""}${some}`), bars(told.labels, told.classes, "Training samples"), periods(told.labels.length));
      if (told.replay) {
        const { samples, room } = told.replay;
        parts.push(make("h4", {}, `Replay buffer: ${samples} of ${room} samples, by class and period${some}`), bars(told.replay.kept, told.classes, "Replay buffer"));
      }
      parts.push(make("h4", {}, "Visits, the last first"));
      parts.push(told.visits.length ? make("div", { class: "scroll", tabindex: 0 }, table(["round", "work", "outcome", "took"], told.visits.map((visit) => [
        visit.attempt ? `${visit.round}, try ${visit.attempt + 1}` : visit.round, visit.program, OUTCOMES[LETTERS.indexOf(visit.outcome)] ?? "–",
        known(visit.time) ? span(visit.time - visit.start) : "–"]))) : make("p", { class: "hint" }, "It was not asked yet."));
      if (told.events.length) {
        parts.push(make("h4", {}, "Events, the last first"), make("div", { class: "scroll", tabindex: 0 },
          table(["time", "event", ""], told.events.map((event) => [span(event.virtual_time), event.event, said({ ...event, device: null })]))));
      }
    }
    this.place.replaceChildren(...parts);
  }
}

// Which colour is which period. Of many the first and the last are named.
function periods(count) {
  const named = [...Array(count).keys()].filter((period) => count <= 10 || period === 0 || period === count - 1);
  return count < 2 ? "" : make("div", { class: "keys" }, ...named.map((period) => {
    const field = make("i");
    field.style.background = tone(period, count);
    return make("span", {}, field, `period ${period + 1}`);
  }));
}

// Stacked bars: one for each class, a colour for each period.
function bars(counts, classes, what) {
  const NS = "http://www.w3.org/2000/svg", width = 420, height = 130, foot = 16;
  const totals = classes.map((_, label) => counts.reduce((sum, row) => sum + row[label], 0));
  const most = Math.max(1, ...totals), wide = width / classes.length;
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "bars");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${what}: ${totals.map((count, label) => count && `${count} of class ${classes[label]}`).filter(Boolean).join(", ") || "none"}.`);
  const add = (tag, attributes, text) => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
    return element;
  };
  const scale = (height - foot - 14) / most;
  totals.forEach((total, label) => {
    let base = height - foot;
    counts.forEach((row, period) => {
      const high = row[label] * scale;
      if (!high) return;
      base -= high;
      const bar = add("rect", { x: label * wide + wide * 0.12, y: base, width: wide * 0.76, height: high });
      bar.style.fill = tone(period, counts.length);
      const title = document.createElementNS(NS, "title");
      title.textContent = `class ${classes[label]}${counts.length > 1 ? `, period ${period + 1}` : ""}: ${row[label]}`;
      bar.append(title);
    });
    const attributes = { x: (label + 0.5) * wide, "text-anchor": "middle", fill: "currentColor" };
    if (total && wide > 14) add("text", { ...attributes, y: base - 3 }, total);
    if (wide > 14) add("text", { ...attributes, y: height - 4 }, String(classes[label]).slice(0, Math.max(1, Math.floor(wide / 7))));
  });
  return svg;
}
