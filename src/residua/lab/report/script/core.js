// What every view needs: the data, elements, numbers as text, colours, the tip, and which series are hidden.

const data = JSON.parse(document.getElementById("data").textContent);

// Text only ever becomes a text node or an attribute value: nothing a run wrote can turn into markup.
function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
const draw = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

const known = (value) => value !== null && value !== undefined;
const weightText = (value) => (known(value) ? value.toFixed(3) : "cannot be read");
const numberText = (value) => (known(value) ? String(Number(value.toPrecision(5))) : "-");
const signedText = (value) => `${value > 0 ? "+" : ""}${value.toFixed(4)}`;
const largestOf = (cells) => Math.max(1e-12, ...cells.flat().filter(known).map(Math.abs));

// [site][source] of the cells of the sites, one after the other; null where a site cannot read a source.
function gridOf(each, cells) {
  let place = 0;
  return each.reads.map((reads) => {
    const row = Array(each.sources.length).fill(null);
    for (const source of reads) {
      row[source] = cells[place];
      place += 1;
    }
    return row;
  });
}
function shortText(value) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(6))}${letter}`;
  return String(Number(value.toPrecision(6)));
}
const clipped = (name, most) => (name.length <= most ? name : `${name.slice(0, most - 1)}\u2026`);
const styleOf = (place) => `c-${data.series[place].colour} d${data.series[place].dash}`;

function swatch(place) {
  const line = draw("path", { class: "line", d: "M0 5H24" });
  return draw("svg", { class: "swatch figure", viewBox: "0 0 24 10", "aria-hidden": "true" },
    draw("g", { class: styleOf(place) }, line));
}
const label = (place) => [swatch(place), el("bdi", {}, data.series[place].label)];

// The scales of colour.py, on square roots: the many small weights show beside the few large ones.
const stops = Object.fromEntries(
  Object.entries(data.colours).map(([name, list]) => [
    name, list.map((text) => [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16)))]),
);
function shade(value, largest, signed) {
  const root = largest ? Math.sign(value) * Math.sqrt(Math.min(1, Math.abs(value) / largest)) : 0;
  const list = signed ? stops.diverging : stops.sequential;
  const place = (signed ? (root + 1) / 2 : Math.max(0, root)) * (list.length - 1);
  const before = Math.min(Math.floor(place), list.length - 2);
  return list[before].map((left, part) => Math.round(left + (list[before + 1][part] - left) * (place - before)));
}
// Whether white reads better than black: where their contrasts are equal, both are 4.58 to 1.
function isDark(colour) {
  const [red, green, blue] = colour.map((part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  return 1.05 / light > light / 0.05;
}

// A canvas cannot use the page's variables: a probe resolves them for the theme in use.
const probe = document.body.appendChild(el("span", { hidden: true }));
const themed = new Map();
function themeColour(name) {
  if (!themed.has(name)) {
    probe.style.color = `var(--${name})`;
    themed.set(name, getComputedStyle(probe).color);
  }
  return themed.get(name);
}

// One tip for the page; it is also what a screen reader hears when an arrow key moves through a picture.
const tip = document.body.appendChild(el("div", { class: "tip", role: "status", "aria-live": "polite", hidden: true }));
function showTip(x, y, ...lines) {
  tip.replaceChildren(...lines.map((line) => (typeof line === "string" ? el("div", {}, el("span", {}, line)) : line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
}
function hideTip() {
  tip.hidden = true;
}
addEventListener("scroll", hideTip, { passive: true });

// Pictures are redrawn when their width, the theme or the hidden series change; off screen, only when they come near.
const pictures = new Map();
const near = new Set();
function redraw(node) {
  const picture = pictures.get(node);
  if (!picture) return;
  picture.stale = true;
  if (!near.has(node) || !node.clientWidth) return;  // what is hidden has no width, and is drawn when it gets one
  picture.stale = false;
  picture.draw();
}
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) near.add(target);
    else near.delete(target);
    if (isIntersecting && pictures.get(target).stale) redraw(target);
  }
}, { rootMargin: "300px" });
const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  const picture = pictures.get(target);
  if (picture.width === target.clientWidth) return;
  picture.width = target.clientWidth;
  redraw(target);
}));
function register(node, drawPicture) {
  pictures.set(node, { draw: drawPicture, width: -1, stale: true });
  seen.observe(node);
  sized.observe(node);
}
function redrawAll() {
  for (const node of pictures.keys()) redraw(node);
}
// Paper has no screen to come near to, and a key may jump further than a wheel.
function drawEverything() {
  for (const [node, picture] of pictures) {
    if (!picture.stale || !node.clientWidth) continue;
    picture.stale = false;
    picture.draw();
  }
}
addEventListener("beforeprint", drawEverything);

// A comparison over several sizes is shown one size at a time, at first the last of those that have most rows: the rows
// of a design look alike at all of them, and one key hides them all. Every legend says the same.
const sizes = [...new Set(data.series.map((series) => series.size))];
const rowsOf = (one) => data.series.filter((series) => series.size === one).length;
let size = sizes.reduce((best, one) => (rowsOf(one) >= rowsOf(best) ? one : best));
const keyOf = (place) => (sizes.length > 1 ? data.series.findIndex((series) => series.name === data.series[place].name) : place);
const off = new Set();
const ofSize = (place) => data.series[place].size === size;
const isHidden = (place) => !ofSize(place) || off.has(keyOf(place));
function showSize() {
  for (const node of document.querySelectorAll("select.size")) node.value = size;
  for (const node of document.querySelectorAll("[data-size]")) node.hidden = node.dataset.size !== size;
  redrawAll();
}
function legend() {
  const keys = [...new Set(data.series.map((_, place) => keyOf(place)))].map((key) =>
    el("button", { type: "button", "aria-pressed": String(!off.has(key)), "data-series": key,
      onclick() {
        if (!off.delete(key)) off.add(key);
        for (const twin of document.querySelectorAll(`.keys [data-series="${key}"]`))
          twin.setAttribute("aria-pressed", String(!off.has(key)));
        redrawAll();
      } }, swatch(key), el("bdi", {}, data.series[key].name)));
  const group = el("div", { class: "keys", role: "group", "aria-label": "Show or hide a series" }, keys);
  if (sizes.length > 1) {
    const node = el("select", { class: "size", onchange() { size = node.value; showSize(); } },
      sizes.map((each) => el("option", { value: each, selected: each === size }, each)));
    group.prepend(el("label", {}, "Size", node));
  }
  return group;
}

function select(id, title, options, chosen, change) {
  const node = el("select", { id, onchange: () => change(node.value) },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
  return el("label", {}, title, node);
}
function checkbox(title, change) {
  const node = el("input", { type: "checkbox", onchange: () => change(node.checked) });
  return el("label", {}, node, title);
}
