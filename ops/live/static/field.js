// The fleet as a field of devices on a canvas. Only the cells that have changed are drawn again.
import { OUTCOMES, OUTCOME_COLOURS, STATES, STATE_COLOURS, colour, counted, make, prepare, swatch } from "./words.js";

const HEIGHT = 380, LARGEST = 24, SMALLEST = 2;
const MARKS = ["", "", "?", "●", "↑", "", "×", "‖"];

export class Field {
  constructor(run, parts, chosen) {
    this.run = run;
    this.parts = parts;
    this.canvas = parts.field;
    this.selected = new Set();
    this.chosen = chosen;
    this.cursor = 0;
    this.drawn = null;
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointercancel", () => this.rest());
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.point(this.cursor));
    this.canvas.addEventListener("blur", () => this.all());
    parts.colouring.addEventListener("change", () => this.all());
    new ResizeObserver(() => this.all()).observe(this.canvas.parentElement);
  }

  get mode() {
    return this.parts.colouring.value;
  }

  names() {
    if (this.mode === "outcome") return [OUTCOMES, OUTCOME_COLOURS];
    if (this.mode === "visits") return [["never asked", `asked (at most ${counted(this.most(), "time")})`], ["line", "visits"]];
    return [STATES, STATE_COLOURS];
  }

  code(device) {
    if (this.mode === "visits") return Number(this.run.visits[device] > 0);
    return this.mode === "outcome" ? this.run.outcomes[device] : this.run.states[device];
  }

  most() {
    return this.run.visits.reduce((most, visits) => Math.max(most, visits), 1);
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth, count = this.run.about.devices;
    let cell = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt((width * HEIGHT) / count))));
    let columns = Math.max(1, Math.floor(width / cell));
    while (cell > SMALLEST && Math.ceil(count / columns) * cell > HEIGHT) columns = Math.floor(width / --cell);
    const rows = Math.ceil(count / columns);
    return { width, cell, columns, rows, height: Math.max(cell, rows * cell), ratio: window.devicePixelRatio };
  }

  all() {
    this.drawn = null;
    this.draw();
  }

  draw() {
    const at = this.layout();
    if (!at.width) return;
    const context = prepare(this.canvas, at.width, at.height);
    const count = this.run.about.devices;
    this.cursor = Math.min(this.cursor, count - 1);
    const paint = this.paint();
    const fresh = this.drawn === null || this.drawn.length !== count || ["cell", "columns", "ratio"].some((one) => this.at?.[one] !== at[one]);
    this.at = at;
    if (fresh) {
      this.drawn = new Int16Array(count).fill(-1);
      context.clearRect(0, 0, at.width, at.height);
    }
    const gap = at.cell >= 10 ? 2 : at.cell >= 4 ? 1 : 0;
    const ring = colour("ink");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${Math.round(at.cell * 0.6)}px system-ui, sans-serif`;
    const focused = document.activeElement === this.canvas;
    for (let device = 0; device < count; device++) {
      const code = paint.code(device), chosen = this.selected.has(device), here = focused && device === this.cursor;
      const look = code * 4 + (chosen ? 1 : 0) + (here ? 2 : 0);
      if (this.drawn[device] === look) continue;
      this.drawn[device] = look;
      const x = (device % at.columns) * at.cell, y = Math.floor(device / at.columns) * at.cell;
      context.clearRect(x, y, at.cell, at.cell);
      context.fillStyle = paint.colours[code];
      context.fillRect(x, y, at.cell - gap, at.cell - gap);
      if (at.cell >= 12 && this.mode === "now" && MARKS[code]) {
        context.fillStyle = "#fff";
        context.fillText(MARKS[code], x + (at.cell - gap) / 2, y + (at.cell - gap) / 2 + 1);
      }
      if (chosen || here) {
        context.strokeStyle = ring;
        context.lineWidth = here ? 2.5 : 1.5;
        context.strokeRect(x + 1, y + 1, at.cell - gap - 2, at.cell - gap - 2);
      }
    }
    this.legend();
  }

  paint() {
    if (this.mode !== "visits") {
      const colours = this.names()[1].map(colour);
      return { code: (device) => this.code(device), colours };
    }
    const most = this.most(), colours = Array.from({ length: 11 }, (_, step) => (step ? shade(step / 10) : colour("line")));
    return { code: (device) => (this.run.visits[device] ? Math.max(1, Math.round((10 * this.run.visits[device]) / most)) : 0), colours };
  }

  counts() {
    const counts = new Array(8).fill(0);
    for (let device = 0; device < this.run.about.devices; device++) counts[this.code(device)] += 1;
    return counts;
  }

  legend() {
    const counts = this.counts();
    const [names, colours] = this.names();
    const key = this.mode + counts.join() + names.join();
    if (key !== this.legendKey) {
      this.legendKey = key;
      const focused = document.activeElement?.dataset?.code;
      this.parts.legend.replaceChildren(...names.map((name, code) => (counts[code] || (this.mode === "now" && code > 0 && code < 7)) &&
        make("button", { type: "button", "data-code": code, title: `select these devices`, onclick: () => this.select(this.having(code)) },
          swatch(colours[code]), `${name} ${counts[code].toLocaleString("en")}`)).filter(Boolean));
      if (focused !== undefined) this.parts.legend.querySelector(`[data-code="${focused}"]`)?.focus();
      this.canvas.setAttribute("aria-label", `Field of ${counted(this.run.about.devices, "device")}: ` +
        names.map((name, code) => `${counts[code]} ${name}`).filter((_, code) => counts[code]).join(", ") +
        ". Arrow keys move, Enter tells the story of a device, Space selects it.");
    }
    this.parts.fieldhint.textContent = this.mode === "visits" ? "the darker, the more often" : "";
  }

  having(code) {
    const found = [];
    for (let device = 0; device < this.run.about.devices; device++) if (this.code(device) === code) found.push(device);
    return found;
  }

  select(devices) {
    this.selected = new Set(devices);
    this.chosen([...this.selected].sort((a, b) => a - b));
    this.all();
  }

  deviceAt(event) {
    const box = this.canvas.getBoundingClientRect(), at = this.at;
    const column = Math.floor((event.clientX - box.left) / at.cell), row = Math.floor((event.clientY - box.top) / at.cell);
    const device = row * at.columns + column;
    return column >= 0 && row >= 0 && column < at.columns && device < this.run.about.devices ? device : null;
  }

  press(event) {
    if (event.button) return;
    this.from = this.deviceAt(event);
    this.cursor = this.from ?? this.cursor;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const device = this.deviceAt(event);
    this.point(device);
    if (this.from !== null && this.from !== undefined && device !== null && device !== this.from) {
      this.dragged = true;
      const [a, b, columns] = [this.from, device, this.at.columns];
      const [left, right] = [a % columns, b % columns].sort((x, y) => x - y);
      const [top, bottom] = [Math.floor(a / columns), Math.floor(b / columns)].sort((x, y) => x - y);
      const found = [];
      for (let row = top; row <= bottom; row++) {
        for (let column = left; column <= right; column++) {
          if (row * columns + column < this.run.about.devices) found.push(row * columns + column);
        }
      }
      this.select(found);
    }
  }

  release(event) {
    if (event.button) return;
    const device = this.deviceAt(event);
    if (!this.dragged && device !== null) {
      this.cursor = device;
      if (event.shiftKey || event.ctrlKey || event.metaKey) this.toggle(device);
      else this.tell(device);
    }
    this.rest();
  }

  // Nothing is pressed any more: it was let go, or the browser scrolls with it.
  rest() {
    this.from = null;
    this.dragged = false;
  }

  toggle(device) {
    const devices = new Set(this.selected);
    if (!devices.delete(device)) devices.add(device);
    this.select(devices);
  }

  key(event) {
    const columns = this.at.columns, last = this.run.about.devices - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      this.cursor = Math.max(0, Math.min(last, this.cursor + steps[event.key]));
      this.point(this.cursor);
    } else if (event.key === "Enter") this.tell(this.cursor);
    else if (event.key === " ") this.toggle(this.cursor);
    else return;
    event.preventDefault();
    this.draw();
  }

  // Replaced by the view: opens the story of a device.
  tell(device) {}

  point(device) {
    if (device === null) return;
    const { states, outcomes, visits } = this.run;
    const last = outcomes[device] === 6 ? "never asked" : `asked ${counted(visits[device], "time")}, the last time ${OUTCOMES[outcomes[device]]}`;
    const text = `Device ${device}: ${STATES[states[device]]}; ${last}`;
    if (this.parts.pointed.textContent !== text) this.parts.pointed.textContent = text;
    if (document.activeElement === this.canvas) document.getElementById("announcer").textContent = text;
  }
}

function shade(share) {
  const [from, to] = [[214, 228, 240], [0, 70, 130]];
  return `rgb(${from.map((value, place) => Math.round(value + share * (to[place] - value))).join()})`;
}
