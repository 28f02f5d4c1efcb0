// Heat maps on a canvas: 100 sites by 200 sources are 20,000 cells, too many for elements and nothing for pixels.

const LARGEST_CELL = 46;
// A finger needs room: maps that can be scrolled have it, and only maps of hundreds of columns are dense.
const smallestCell = (columns) => (columns <= 48 ? 18 : columns <= 120 ? 9 : 4);

// Colours by level, as the bytes of a pixel: looked up for every cell, worked out once.
const LEVELS = 1024;
const word = ([red, green, blue]) => new Uint32Array(new Uint8ClampedArray([red, green, blue, 255]).buffer)[0];
const tables = new Map();
function levels(signed) {
  if (!tables.has(signed))
    tables.set(signed, Uint32Array.from({ length: LEVELS + 1 }, (_, place) => {
      const root = signed ? (2 * place) / LEVELS - 1 : place / LEVELS;
      return word(shade(Math.sign(root) * root * root, 1, signed));
    }));
  return tables.get(signed);
}
function level(value, largest, signed) {
  const root = Math.sqrt(Math.min(1, Math.abs(value) / largest));
  if (!signed) return value > 0 ? Math.round(root * LEVELS) : 0;
  return Math.round(((value < 0 ? 1 - root : 1 + root) / 2) * LEVELS);
}

// options() gives {title, rows, columns, value(row, column), signed, largest, text(row, column, value), picked, pick}.
// `picked` is {row, column}, each a place or -1; `pick(row, column)` hears clicks: -1 for what a label leaves open.
function heatMap(options) {
  const scroll = el("div", { class: "scroll" });
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Heat map" });
  scroll.append(canvas);
  let shown = null;
  let cursor = null;

  function layout() {
    const wanted = options();
    const room = Math.max(120, scroll.clientWidth);
    const context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const longest = (names) => Math.max(...names.map((name) => context.measureText(clipped(name, 14)).width));
    const left = Math.ceil(longest(wanted.rows)) + 10;
    const top = Math.ceil(longest(wanted.columns) * 0.87) + 14;
    const over = 26;  // the last slanted label leans out to the right
    const wide = Math.max(smallestCell(wanted.columns.length), Math.min(LARGEST_CELL, (room - left - over) / wanted.columns.length));
    const high = Math.max(smallestCell(wanted.rows.length), Math.min(24, wide, 620 / wanted.rows.length), Math.min(14, 520 / wanted.rows.length));
    return { wanted, left, top, wide, high,
      width: Math.ceil(left + wide * wanted.columns.length + over), height: Math.ceil(top + high * wanted.rows.length + 2) };
  }

  // The cells at one pixel each, enlarged without smoothing: the cost of a redraw is the number of cells, once.
  function pixels({ wanted }) {
    const { columns, rows, value, largest, signed } = wanted;
    const image = new ImageData(columns.length, rows.length);
    const words = new Uint32Array(image.data.buffer);
    const blank = word(themeColour("none").match(/\d+/g).map(Number));
    const table = levels(signed);
    let place = 0;
    for (let row = 0; row < rows.length; row += 1)
      for (let column = 0; column < columns.length; column += 1) {
        const weight = value(row, column);
        words[place] = known(weight) ? table[level(weight, largest, signed)] : blank;
        place += 1;
      }
    const small = document.createElement("canvas");
    small.width = image.width;
    small.height = image.height;
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
  }

  function drawMap() {
    shown = layout();
    shown.cells = pixels(shown);
    canvas.setAttribute("aria-label", `${shown.wanted.title}. Arrow keys move, Enter picks, Escape lets go.`);
    paint();
  }

  function paint() {
    const { wanted, left, top, wide, high, width, height, cells } = shown;
    const dense = window.devicePixelRatio || 1;
    canvas.width = width * dense;
    canvas.height = height * dense;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(dense, dense);
    context.imageSmoothingEnabled = false;
    const columns = wanted.columns.length;
    const rows = wanted.rows.length;
    context.drawImage(cells, left, top, wide * columns, high * rows);
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    if (wide >= 12 && high >= 10) {
      context.strokeStyle = themeColour("page");
      for (let row = 0; row <= rows; row += 1) line(context, left, top + row * high, left + wide * columns, top + row * high);
      for (let column = 0; column <= columns; column += 1) line(context, left + column * wide, top, left + column * wide, top + high * rows);
    }
    if (wide >= (wanted.digits === 3 ? 40 : 34) && high >= 18) numbers(context);
    labels(context);
    context.strokeStyle = themeColour("ink");
    context.lineWidth = 2;
    const { row, column } = wanted.picked || { row: -1, column: -1 };
    if (row >= 0) context.strokeRect(left, top + row * high, wide * columns, high);
    if (column >= 0) context.strokeRect(left + column * wide, top, wide, high * rows);
    if (cursor) {
      context.strokeStyle = themeColour("vermillion");
      context.strokeRect(left + cursor.column * wide + 1, top + cursor.row * high + 1, Math.max(2, wide - 2), Math.max(2, high - 2));
    }
  }

  function line(context, x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  function numbers(context) {
    const { wanted, left, top, wide, high } = shown;
    context.textAlign = "center";
    context.textBaseline = "middle";
    wanted.rows.forEach((_, row) => wanted.columns.forEach((__, column) => {
      const value = wanted.value(row, column);
      if (!known(value)) return;
      context.fillStyle = isDark(shade(value, wanted.largest, wanted.signed)) ? "#fff" : "#000";
      context.fillText(value.toFixed(wanted.digits || 2).replace(/^-(0\.0*)$/, "$1"), left + (column + 0.5) * wide, top + (row + 0.5) * high);
    }));
  }

  function labels(context) {
    const { wanted, left, top, wide, high } = shown;
    const picked = wanted.picked || { row: -1, column: -1 };
    const ink = (here) => { context.fillStyle = themeColour(here ? "ink" : "soft"); };
    context.textBaseline = "middle";
    context.textAlign = "right";
    const everyRow = Math.max(1, Math.ceil(12 / high));
    wanted.rows.forEach((name, row) => {
      if (row % everyRow && row !== picked.row) return;
      ink(row === picked.row);
      context.fillText(clipped(name, 14), left - 5, top + (row + 0.5) * high);
    });
    context.textAlign = "left";
    const everyColumn = Math.max(1, Math.ceil(15 / wide));
    wanted.columns.forEach((name, column) => {
      if (column % everyColumn && column !== picked.column) return;
      ink(column === picked.column);
      context.save();
      context.translate(left + (column + 0.5) * wide, top - 6);
      context.rotate(-Math.PI / 3);
      context.fillText(clipped(name, 14), 0, 0);
      context.restore();
    });
  }

  // A place in the margin belongs to a whole row or column.
  function locate(event) {
    const box = canvas.getBoundingClientRect();
    const { wanted, left, top, wide, high } = shown;
    const column = Math.floor((event.clientX - box.left - left) / wide);
    const row = Math.floor((event.clientY - box.top - top) / high);
    const inRow = row >= 0 && row < wanted.rows.length;
    const inColumn = column >= 0 && column < wanted.columns.length;
    return { row: inRow ? row : -1, column: inColumn ? column : -1, inside: inRow && inColumn };
  }

  function tell(x, y, { row, column }) {
    const { wanted } = shown;
    showTip(x, y, wanted.text(row, column, wanted.value(row, column)));
  }

  canvas.addEventListener("pointermove", (event) => {
    const place = locate(event);
    if (!place.inside) return leave();
    if (!cursor || cursor.row !== place.row || cursor.column !== place.column) {
      cursor = place;
      paint();
    }
    return tell(event.clientX, event.clientY, place);
  });
  function leave() {
    if (cursor) {
      cursor = null;
      paint();
    }
    hideTip();
  }
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("click", (event) => {
    const { row, column } = locate(event);
    if (shown.wanted.pick && (row >= 0 || column >= 0)) shown.wanted.pick(row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const { wanted, left, top, wide, high } = shown;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) {
      event.preventDefault();
      const start = cursor || { row: -step[0], column: -step[1] };
      const within = (value, count) => Math.min(count - 1, Math.max(0, value));
      cursor = { row: within(start.row + step[0], wanted.rows.length), column: within(start.column + step[1], wanted.columns.length) };
      paint();
      const box = canvas.getBoundingClientRect();
      tell(box.left + left + (cursor.column + 1) * wide, box.top + top + (cursor.row + 1) * high, cursor);
    } else if (event.key === "Enter" && cursor && wanted.pick) {
      wanted.pick(cursor.row, cursor.column);
    } else if (event.key === "Escape") {
      leave();
      if (wanted.pick) wanted.pick(-1, -1);
    }
  });
  // The cells are as they were; what is picked has changed.
  function touch() {
    if (!shown) return;
    shown.wanted.picked = options().picked;
    paint();
  }
  register(scroll, drawMap);
  return { node: scroll, draw: () => redraw(scroll), touch };
}

function ramp(largest, signed) {
  const steps = 24;
  const at = (place) => {
    const root = signed ? (2 * place) / (steps - 1) - 1 : place / (steps - 1);
    return Math.sign(root) * root * root * largest;
  };
  const end = (value) => String(Number(value.toPrecision(3)));
  const bars = Array.from({ length: steps }, (_, place) =>
    draw("rect", { x: place, width: 1.05, height: 1, fill: `rgb(${shade(at(place), largest, signed)})` }));
  return el("div", { class: "ramp" }, el("span", {}, end(signed ? -largest : 0)),
    draw("svg", { viewBox: `0 0 ${steps} 1`, preserveAspectRatio: "none", "aria-hidden": "true" }, bars),
    el("span", {}, end(largest)), el("span", {}, "square-root scale"));
}
