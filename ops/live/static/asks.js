// The asks of a round as a timeline: a bar for each device, from its start to its end, in the colour of its outcome.
import { LETTERS, OUTCOMES, OUTCOME_COLOURS, colour, counted, known, make, prepare, span, swatch, table } from "./words.js";

const TALLEST = 380, LEFT = 52, FOOT = 20;
const ROOMY = 460; // the width from which on five times such as "59 min 30 s" stand below an ask

export class Asks {
  constructor(run, parts, tell) {
    Object.assign(this, { run, parts, tell });
    this.shown = null;
    parts.earlier.addEventListener("click", () => this.step(-1));
    parts.later.addEventListener("click", () => this.step(1));
    parts.latest.addEventListener("click", () => this.show(null));
    parts.asktable.parentElement.addEventListener("toggle", () => this.tabled());
    parts.asks.addEventListener("click", (event) => {
      const place = Math.floor((event.clientY - parts.asks.getBoundingClientRect().top) / (this.high || 1));
      if (this.order?.[place]) tell(this.order[place].device);
    });
    new ResizeObserver(() => this.draw()).observe(parts.asks.parentElement);
    parts.askkeys.replaceChildren(...OUTCOMES.slice(0, 6).map((name, code) => make("span", {}, swatch(OUTCOME_COLOURS[code]), name)));
  }

  get place() {
    const place = this.shown === null ? -1 : this.run.asks.findIndex((ask) => ask.ask === this.shown);
    return place < 0 ? this.run.asks.length - 1 : place;
  }

  step(by) {
    const next = Math.max(0, Math.min(this.run.asks.length - 1, this.place + by));
    this.show(next === this.run.asks.length - 1 ? null : this.run.asks[next].ask);
  }

  show(ask) {
    this.shown = ask;
    this.draw();
  }

  draw() {
    const { parts, run } = this, ask = run.asks[this.place], width = parts.asks.parentElement.clientWidth;
    parts.latest.setAttribute("aria-pressed", String(this.shown === null));
    parts.earlier.disabled = this.place <= 0;
    parts.later.disabled = this.place >= run.asks.length - 1;
    parts.asks.hidden = !ask;
    if (!ask) {
      parts.askline.textContent = run.status.ask ? this.open(run.status.ask) : "No ask is over yet.";
      return;
    }
    const attempt = ask.attempt ? `, try ${ask.attempt + 1}` : "";
    parts.asktitle.textContent = `Round ${ask.round}${attempt} · ${ask.program}`;
    const counts = [...LETTERS].map((letter, code) => ask.counts[letter] && `${ask.counts[letter]} ${OUTCOMES[code]}`).filter(Boolean);
    const some = ask.asked > ask.devices.length ? ` The first ${ask.devices.length} are drawn.` : "";
    const told = `${counted(ask.asked, "device")} asked: ${counts.join(", ")}. It took ${span(ask.end - ask.start)} of the experiment's time.${some}`;
    parts.askline.textContent = this.shown === null && run.status.ask ? `${told} ${this.open(run.status.ask)}` : told;
    parts.asks.setAttribute("aria-label", `Timeline of round ${ask.round}: ${told}`);
    this.order = ask.devices.map((device, place) => ({ device, letter: ask.outcomes[place], time: ask.times[place] ?? null }))
      .sort((a, b) => (a.time ?? Infinity) - (b.time ?? Infinity) || a.device - b.device);
    if (width) this.bars(ask, width);
    this.tabled();
  }

  bars(ask, width) {
    const high = (this.high = Math.max(1, Math.min(15, TALLEST / this.order.length)));
    const height = Math.ceil(high * this.order.length) + FOOT;
    const context = prepare(this.parts.asks, width, height);
    context.clearRect(0, 0, width, height);
    const times = this.order.map((one) => one.time).filter(known);
    const last = Math.max(ask.end, ...times.filter((time) => time <= ask.end + 2 * (ask.end - ask.start))) - ask.start || 1;
    const x = (time) => LEFT + Math.min(1, (time - ask.start) / last) * (width - LEFT - 8);
    const [soft, grid] = [colour("soft"), colour("grid")];
    const colours = OUTCOME_COLOURS.map(colour);
    context.font = "11px system-ui, sans-serif";
    const ticks = width < ROOMY ? 2 : 4;
    for (let tick = 0; tick <= ticks; tick++) {
      const at = x(ask.start + (last * tick) / ticks);
      context.fillStyle = grid;
      context.fillRect(at, 0, 1, height - FOOT);
      context.fillStyle = soft;
      context.textAlign = tick === ticks ? "right" : tick ? "center" : "left";
      context.fillText(span((last * tick) / ticks), at, height - 5);
    }
    context.font = `${high >= 11 ? 11 : 9}px system-ui, sans-serif`;
    this.order.forEach(({ device, letter, time }, row) => {
      const y = row * high, code = LETTERS.includes(letter) ? LETTERS.indexOf(letter) : OUTCOMES.length - 1;
      context.fillStyle = colours[code];
      context.globalAlpha = letter === "c" || letter === "l" ? 0.55 : 1;
      const end = known(time) ? Math.max(LEFT + 2, x(time)) : x(ask.end);
      context.fillRect(LEFT, y + (high > 6 ? 2 : 0), end - LEFT, Math.max(1, high - (high > 6 ? 4 : 0.5)));
      context.globalAlpha = 1;
      if (high >= 9) {
        context.fillStyle = soft;
        context.textAlign = "right";
        context.fillText(String(device), LEFT - 6, y + high / 2 + 4);
        if (letter === "d") {
          context.fillStyle = colours[code];
          context.textAlign = "left";
          context.fillText("×", Math.min(width - 10, end + 3), y + high / 2 + 4);
        }
      }
    });
    context.strokeStyle = colour("ink");
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x(ask.end), 0);
    context.lineTo(x(ask.end), height - FOOT);
    context.stroke();
    context.setLineDash([]);
  }

  open(ask) {
    const counts = Object.entries(ask.counts).map(([outcome, count]) => `${count} ${outcome}`).join(", ");
    return `Now: ask ${ask.ask}, ${counted(ask.asked, "device")} asked${counts ? `, ${counts}` : ""}.`;
  }

  tabled() {
    const ask = this.run.asks[this.place];
    if (!ask || !this.parts.asktable.parentElement.open) return;
    this.parts.asktable.replaceChildren(table(["device", "outcome", "after"],
      this.order.map(({ device, letter, time }) => [device, OUTCOMES[LETTERS.indexOf(letter)] ?? "–", known(time) ? span(time - ask.start) : "–"])));
  }
}
