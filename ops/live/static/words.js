// Figures and words as people read them: shares in percent, spans and sizes in the unit that suits them.

export const STATES = ["not here yet", "on-line", "asked", "training", "uploading", "away", "crashed", "frozen"];
export const STATE_COLOURS = ["line", "green", "sky", "blue", "purple", "axis", "red", "orange"];
export const OUTCOMES = ["accepted", "cancelled", "late", "dropped", "failed", "rejected", "never asked"];
export const OUTCOME_COLOURS = ["green", "grey", "orange", "sky", "red", "slate", "line"];
export const LETTERS = "acldfr";
// The lines of a chart take these in turn.
export const TONES = ["blue", "orange", "green", "red", "purple", "sky", "slate"], DASHES = [undefined, [9, 4], [2, 4]];

export const known = (value) => value !== null && value !== undefined;
// What is rounded to 0 has no sign.
export const percent = (share, digits = 1) => (known(share) ? `${(100 * share).toFixed(digits).replace(/^-(?=[0.]+$)/, "")} %` : "–");
export const counted = (number, noun, nouns = `${noun}s`) => `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;

export function span(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export function bytes(size) {
  if (!known(size)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(size) < 999.5) return `${unit === "B" || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)} TB`;
}

export const rate = (value) => (known(value) ? (value >= 10 ? Math.round(value).toLocaleString("en") : value.toFixed(1)) : "–");
export const decimal = (value, digits) => (known(value) ? (Math.abs(value) < 1e6 ? value.toFixed(digits) : value.toExponential(1)) : "–");

// The colours of the page as they are now, light or dark.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

// An element with attributes and children. Texts are always texts, never markup.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && known(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(known).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function table(head, rows) {
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))))));
}

// A field in a colour, striped for a line with such a dash.
export function swatch(name, dash) {
  const field = document.createElement("i"), tone = `var(--${name})`;
  field.style.background = dash ? `repeating-linear-gradient(90deg, ${tone} 0 ${dash[0] / 3}px, transparent 0 ${(dash[0] + dash[1]) / 3}px)` : tone;
  return field;
}

// Calls "shown" when an element comes into the window, or goes onto paper, and tells whether it is there.
export function watchShown(element, shown) {
  const seen = { now: false };
  element.dataset.watched = "";
  element.addEventListener("printed", () => {
    const before = seen.now;
    seen.now = true;
    if (!before) shown();
    seen.now = before;
  });
  new IntersectionObserver(([entry]) => {
    const before = seen.now;
    seen.now = entry.isIntersecting;
    if (seen.now && !before) shown();
  }, { rootMargin: "150px" }).observe(element);
  return seen;
}

// One listener for the whole page, so that no element is kept that the page does not show any more.
window.addEventListener("beforeprint", () => {
  for (const element of document.querySelectorAll("[data-watched]")) element.dispatchEvent(new Event("printed"));
});

// A canvas whose pixels are those of the screen. Returns its context and its size in CSS pixels.
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
