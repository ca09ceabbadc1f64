// Charts by uPlot, and the heat map of classes. Each has a sentence that says its last values, and a table.
import { bytes, colour, known, make, percent, prepare, span, swatch, table, watchShown } from "./words.js";

const HEIGHT = 210, TABLE_ROWS = 20;
const share = (u, values) => values.map((value) => (known(value) ? `${Math.round(1000 * value) / 10} %` : ""));
const size = (u, values) => values.map((value) => bytes(value));
// A round may take milliseconds, and most of it may be one part of it.
const brief = (seconds) => (known(seconds) && seconds < 1 ? (seconds > 0 ? `${Number((1000 * seconds).toPrecision(3))} ms` : "0 s") : span(seconds));
const time = (u, values) => values.map((value) => (known(value) ? brief(value) : ""));
// Many zeros have no room beside an axis.
const number = (value) => (value && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7) ? Number(value.toPrecision(4)).toExponential() : value.toLocaleString("en", { maximumSignificantDigits: 4 }));
const plain = (u, values) => values.map((value) => (known(value) ? number(value) : ""));
export const FORMS = { share: [share, percent], size: [size, bytes], time: [time, brief], plain: [plain, (v) => (known(v) ? number(v) : "–")] };

// Rounds are whole numbers, which a browser would write in the form of its user's own language.
const whole = (u, values) => values.map((value) => (known(value) ? value.toLocaleString("en") : ""));
const STEPS = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

export class Chart {
  // lines: [name, colour, (row) => value, dash], or a function of the rows that tells them; rows come from draw().
  constructor(parent, title, form, lines, options = {}) {
    this.title = title;
    this.form = FORMS[form];
    this.linesOf = typeof lines === "function" ? lines : () => lines;
    this.lines = this.linesOf([]);
    this.options = { x: "round", at: (row) => row.round, ...options };
    this.plot = make("div", { class: "plot", role: "img", "aria-label": title });
    this.caption = make("figcaption");
    this.body = make("div", { class: "scroll", tabindex: 0 });
    this.details = make("details", { ontoggle: () => this.tabled() }, make("summary", {}, "as a table"), this.body);
    this.figure = make("figure", { class: "chart" }, make("h3", {}, title), this.plot, this.caption, this.details);
    this.keys = make("div", { class: "keys" });
    if (this.lines.length !== 1) this.figure.insertBefore(this.keys, this.caption);
    parent.append(this.figure);
    new ResizeObserver(() => this.resize()).observe(this.plot);
    this.seen = watchShown(this.figure, () => this.rows && this.draw(this.rows));
  }

  resize() {
    if (this.u && this.plot.clientWidth && this.u.width !== this.plot.clientWidth) this.u.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }

  restyle() {
    this.close();
    if (this.rows) this.draw(this.rows);
  }

  // uPlot keeps what it has drawn, also when the page does not show it any more, until this.
  close() {
    this.u?.destroy();
    this.u = null;
  }

  draw(rows) {
    this.rows = rows;
    this.lines = this.linesOf(rows);
    const drawn = this.lines.filter(([, , value]) => rows.some((row) => known(value(row))));
    this.figure.hidden = !drawn.length && this.options.optional;
    if (!this.seen.now) return this.say(drawn, rows);
    const kept = rows.filter((row) => drawn.some(([, , value]) => known(value(row))));
    const data = [kept.map(this.options.at), ...drawn.map(([, , value]) => kept.map((row) => value(row) ?? null))];
    const key = drawn.map(([name]) => name).join("\n");
    if (this.u && key === this.key) this.u.setData(data);
    else this.make(drawn, data, key);
    this.say(drawn, kept);
    if (this.details.open) this.tabled();
  }

  make(drawn, data, key) {
    this.close();
    this.key = key;
    if (!this.plot.clientWidth || !drawn.length) return;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("axis"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    this.u = new uPlot({
      width: this.plot.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: this.options.range ? { range: this.options.range } : {} },
      axes: [{ ...axis, size: 30, ...(this.options.xform ? { values: FORMS[this.options.xform][0] } : { values: whole, incrs: STEPS }) },
        { ...axis, values: this.form[0], size: 62 }],
      series: [{}, ...drawn.map(([name, tone, , dash]) => ({ label: name, stroke: colour(tone), width: 2, spanGaps: true, dash, points: { show: (u, line) => u.data[line].filter(known).length < 3 } }))],
      hooks: { setCursor: [(u) => this.point(u, drawn)] },
    }, data, this.plot);
    this.keys.replaceChildren(...drawn.map(([name, tone, , dash]) => make("span", {}, swatch(tone, dash), name)));
  }

  point(u, drawn) {
    const place = u.cursor.idx;
    if (!known(place) || !known(u.data[0][place])) return this.caption.replaceChildren(this.sentence || "");
    const where = this.options.xform ? span(u.data[0][place]) : `${this.options.x} ${u.data[0][place]}`;
    this.caption.textContent = `${where}: ${drawn.map(([name], line) => `${name} ${this.form[1](u.data[line + 1][place])}`).join(", ")}`;
  }

  say(drawn, rows) {
    const last = drawn.map(([name, , value]) => {
      const row = rows.findLast((one) => known(value(one)));
      return row && `${name} ${this.form[1](value(row))}`;
    }).filter(Boolean);
    this.sentence = last.length ? last.join(", ") : "nothing was measured yet";
    if (!this.u || !known(this.u.cursor.idx)) this.caption.textContent = this.sentence;
    this.plot.setAttribute("aria-label", `${this.title}. Last: ${this.sentence}.`);
  }

  tabled() {
    if (!this.details.open || !this.rows) return;
    const rows = this.rows.slice(-TABLE_ROWS).reverse();
    this.body.replaceChildren(table([this.options.x, ...this.lines.map(([name]) => name)],
      rows.map((row) => [this.options.xform ? span(this.options.at(row)) : this.options.at(row), ...this.lines.map(([, , value]) => this.form[1](value(row)))])));
  }
}

const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
export function viridis(value) {
  const place = Math.max(0, Math.min(1, value)) * (VIRIDIS.length - 1), low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return `rgb(${VIRIDIS[low].map((tone, channel) => Math.round(tone + (place - low) * (VIRIDIS[low + 1][channel] - tone))).join()})`;
}

// A name that fits beside a chart.
const short = (name) => (String(name).length > 16 ? `${String(name).slice(0, 15)}…` : String(name));

export class Heat {
  // ``named`` gives the name of a row by its number, which counts from 0.
  constructor(parent, title, column, what, named) {
    Object.assign(this, { title, column, what, named });
    this.canvas = make("canvas", { role: "img", "aria-label": title });
    this.plot = make("div", { class: "plot" }, this.canvas);
    this.caption = make("figcaption");
    this.body = make("div", { class: "scroll", tabindex: 0 });
    this.details = make("details", { ontoggle: () => this.tabled() }, make("summary", {}, "as a table"), this.body);
    this.figure = make("figure", { class: "chart" }, make("h3", {}, title), this.plot, this.caption, this.details);
    parent.append(this.figure);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.say());
    new ResizeObserver(() => this.rows && this.draw(this.rows)).observe(this.plot);
    this.seen = watchShown(this.figure, () => this.rows && this.draw(this.rows));
  }

  restyle() {
    if (this.rows) this.draw(this.rows);
  }

  close() {}

  draw(rows) {
    this.rows = rows;
    this.kept = rows.filter((row) => row[this.column]);
    const width = this.plot.clientWidth, foot = 18;
    this.figure.hidden = !this.kept.length;
    if (!this.seen.now) return this.say();
    if (!width || !this.kept.length) return;
    const values = this.kept, classes = values[values.length - 1][this.column].length;
    const context = prepare(this.canvas, width, HEIGHT);
    context.clearRect(0, 0, width, HEIGHT);
    context.font = "11px system-ui, sans-serif";
    const high = (HEIGHT - foot - 4) / classes, every = Math.max(1, Math.ceil(14 / high));
    const names = values[values.length - 1][this.column].map((_, label) => (label % every ? "" : short(this.named(label))));
    const left = Math.max(40, ...names.map((name) => Math.ceil(context.measureText(name).width) + 9)), right = width - 4;
    // A column reaches from its round to that of the next one. The last one is as wide as the one before.
    const first = values[0].round, last = values[values.length - 1].round, gap = values.length > 1 ? last - values[values.length - 2].round : 1;
    const wide = (right - left) / (last + gap - first);
    this.at = { left, wide, high, classes, first };
    let from = left;
    values.forEach((row, place) => {
      const next = values[place + 1], to = next ? left + (next.round - first) * wide : right;
      if (next && to - from < 1) return; // Of columns in one pixel the last one is drawn.
      row[this.column].forEach((value, label) => {
        context.fillStyle = known(value) ? viridis(value) : colour("line");
        context.fillRect(from, label * high, Math.max(1, to - from) + 0.5, high + 0.5);
      });
      from = to;
    });
    context.fillStyle = colour("soft");
    context.textBaseline = "middle";
    context.textAlign = "right";
    // The first name of many stays whole, too.
    names.forEach((name, label) => context.fillText(name, left - 5, Math.max(6, (label + 0.5) * high)));
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(`round ${first}`, left, HEIGHT - 4);
    context.textAlign = "right";
    context.fillText(`${last}`, right, HEIGHT - 4);
    this.say();
    this.tabled();
  }

  say() {
    const last = this.kept?.[this.kept.length - 1];
    if (!last) return;
    const known_ = last[this.column].map((value, label) => [value, this.named(label)]).filter(([value]) => known(value));
    if (!known_.length) return;
    const [worst, best] = [known_.reduce((a, b) => (b[0] < a[0] ? b : a)), known_.reduce((a, b) => (b[0] > a[0] ? b : a))];
    const text = `round ${last.round}: ${this.what} ${best[1]} is best with ${percent(best[0])}, ${this.what} ${worst[1]} is worst with ${percent(worst[0])}`;
    this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `${this.title}. ${text}.`);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const round = this.at.first + (event.clientX - box.left - this.at.left) / this.at.wide, label = Math.floor((event.clientY - box.top) / this.at.high);
    const row = this.kept.findLast((one) => one.round <= round);
    if (row && label >= 0 && label < this.at.classes) {
      this.caption.textContent = `round ${row.round}, ${this.what} ${this.named(label)}: ${percent(row[this.column][label])}`;
    }
  }

  tabled() {
    const last = this.kept?.[this.kept.length - 1];
    if (!this.details.open || !last) return;
    this.body.replaceChildren(table([this.what, `accuracy after round ${last.round}`],
      last[this.column].map((value, label) => [this.named(label), percent(value)])));
  }
}
