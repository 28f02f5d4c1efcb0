// The routing explorer: one state, chosen by selects, the slider, the tokens or the maps, and everything drawn from it.

const MEAN = "mean";

// A series' weights under a choice of seed, view and token.
function weightsOf(place, state) {
  const route = data.routing[place];
  if (!route.cells) {
    let count = 0;
    route.cells = route.reads.map((reads) => {
      const row = new Int32Array(route.sources.length).fill(-1);
      for (const source of reads) {
        row[source] = count;
        count += 1;
      }
      return row;
    });
    route.count = count;
  }
  const cell = (site, source) => (site >= 0 && source >= 0 ? route.cells[site][source] : -1);
  const seed = route.seeds.indexOf(state.seed);
  const view = route.views.includes(state.view) ? state.view : MEAN;
  const token = state.token - 1;
  if (token < 0 || !route.tokens || token >= route.tokens.length) {
    const list = route.means[view][1 + seed];
    const largest = list ? Math.max(...list.filter(known).map(Math.abs), 1e-12) : 1;
    const sample = `mean over ${view.startsWith("head") ? "the prompt" : route.sample}`;
    return { route, largest, sample, at: (site, source) => (list && cell(site, source) >= 0 ? list[cell(site, source)] : null) };
  }
  const arrays = tokenArrays(route, route.packed_seeds.indexOf(state.seed));
  const start = Math.max(0, route.packed_views.indexOf(view)) * route.count;
  const at = (site, source, which = token) => {
    const found = cell(site, source);
    if (found < 0) return null;
    let total = 0;
    for (const array of arrays) total += array[(start + found) * route.tokens.length + which];
    return (total / arrays.length) * route.step;
  };
  return { route, at, largest: route.top, sample: `token ${state.token}` };
}

// 16-bit multiples of `step`; unpacked once.
function tokenArrays(route, seed) {
  if (!route.arrays) {
    route.arrays = route.packed.map((text) => {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      const view = new DataView(bytes.buffer);
      return Int16Array.from({ length: bytes.length / 2 }, (_, place) => view.getInt16(2 * place, true));
    });
    let top = 0;
    for (const array of route.arrays) for (const value of array) top = Math.max(top, Math.abs(value));
    route.top = top * route.step || 1;
  }
  return seed < 0 ? route.arrays : [route.arrays[seed]];
}

function explorer(mount) {
  const routed = data.routing.map((route, place) => (route ? place : -1)).filter((place) => place >= 0);
  const withTokens = routed.filter((place) => data.routing[place].tokens);
  const best = withTokens.length ? withTokens : routed;
  // the last two designs of a plan are what it is about; the first is its baseline
  const state = { a: best[best.length - 1], b: best.length > 1 ? best[best.length - 2] : -1, seed: -1, view: MEAN, token: 0, site: null, source: null };
  const names = (place) => data.series[place].label;
  const bar = el("div", { class: "bar" });
  const tokenBar = el("div", { class: "bar" });
  const tokenStrip = el("div", { class: "tokens", role: "group", "aria-label": "Tokens of the prompt" });
  const readout = el("p", { class: "readout", "aria-live": "polite", id: "readout" });
  const lists = el("div", { class: "pair" });
  const captions = { a: el("figcaption"), b: el("figcaption"), difference: el("figcaption"), strip: el("figcaption") };
  const ramps = { a: el("div"), difference: el("div"), strip: el("div") };
  const figures = {};

  function change(changes) {
    Object.assign(state, changes);
    const { route } = weightsOf(state.a, state);
    if (!route.sites.includes(state.site)) state.site = null;
    if (!route.sources.includes(state.source)) state.source = null;
    if (!route.tokens || state.token > route.tokens.length) state.token = 0;
    if (state.b === state.a) state.b = -1;
    show();
  }
  const pickIn = (rows, columns) => (row, column) =>
    change({ site: row < 0 ? (column < 0 ? null : state.site) : rows[row], source: column < 0 ? (row < 0 ? null : state.source) : columns[column] });

  function mapOf(key) {
    const own = weightsOf(state[key], state);
    const other = key === "a" && state.b >= 0 ? weightsOf(state.b, state) : key === "b" ? weightsOf(state.a, state) : own;
    const { route } = own;
    const signed = route.signed || other.route.signed;
    return { title: `Weights of ${names(state[key])}`, rows: route.sites, columns: route.sources, value: own.at, signed,
      largest: Math.max(own.largest, other.largest),
      text: (row, column, value) => `${route.sites[row]} \u2190 ${route.sources[column]}: ${weightText(value)}`,
      picked: { row: route.sites.indexOf(state.site), column: route.sources.indexOf(state.source) },
      pick: pickIn(route.sites, route.sources) };
  }

  // Sites and sources are the same where their names are; what only one design has cannot be subtracted.
  function difference() {
    const [a, b] = [weightsOf(state.a, state), weightsOf(state.b, state)];
    const rows = a.route.sites.filter((name) => b.route.sites.includes(name));
    const columns = a.route.sources.filter((name) => b.route.sources.includes(name));
    const value = (row, column) => {
      const left = a.at(a.route.sites.indexOf(rows[row]), a.route.sources.indexOf(columns[column]));
      const right = b.at(b.route.sites.indexOf(rows[row]), b.route.sources.indexOf(columns[column]));
      return known(left) && known(right) ? left - right : null;
    };
    let largest = 1e-12;
    rows.forEach((_, row) => columns.forEach((__, column) => { largest = Math.max(largest, Math.abs(value(row, column) || 0)); }));
    return { title: "Difference", rows, columns, value, signed: true, largest,
      text: (row, column, gap) => `${rows[row]} \u2190 ${columns[column]}: ${known(gap) && gap > 0 ? "+" : ""}${known(gap) ? gap.toFixed(3) : "not in both"}`,
      picked: { row: rows.indexOf(state.site), column: columns.indexOf(state.source) }, pick: pickIn(rows, columns) };
  }

  // Rows: the sources of the picked site; else the sites that read the picked source; else the sites' largest weights.
  function strip() {
    const token = state.token || 1;
    const { route, at } = weightsOf(state.a, { ...state, token });
    const site = route.sites.indexOf(state.site);
    const source = route.sources.indexOf(state.source);
    const columns = route.tokens;
    const base = { columns, signed: route.signed, largest: route.top };
    const pick = (row, column) => change(column >= 0 ? { token: column + 1 } : row < 0 ? { token: 0 } : {});
    const picked = (row) => ({ row, column: state.token - 1 });
    if (site >= 0) {
      const reads = route.reads[site];
      const rows = reads.map((place) => route.sources[place]);
      return { ...base, rows, title: `What ${state.site} reads, token by token`, pick, picked: picked(rows.indexOf(state.source)),
        value: (row, column) => at(site, reads[row], column),
        text: (row, column, value) => `${columns[column]}: ${state.site} \u2190 ${rows[row]}: ${weightText(value)}` };
    }
    if (source >= 0) {
      const readers = route.sites.map((_, place) => place).filter((place) => route.reads[place].includes(source));
      return { ...base, rows: readers.map((place) => route.sites[place]), title: `Who reads ${state.source}, token by token`, pick, picked: picked(-1),
        value: (row, column) => at(readers[row], source, column),
        text: (row, column, value) => `${columns[column]}: ${route.sites[readers[row]]} \u2190 ${state.source}: ${weightText(value)}` };
    }
    const best = (row, column) => route.reads[row].reduce((found, place) => {
      const value = at(row, place, column);
      return Math.abs(value) > Math.abs(found.value) || found.place < 0 ? { value, place } : found;
    }, { value: 0, place: -1 });
    return { ...base, rows: route.sites, title: "Largest weight of every site, token by token", pick, picked: picked(-1),
      value: (row, column) => best(row, column).value,
      text: (row, column, value) => `${columns[column]}: ${route.sites[row]} \u2190 ${route.sources[best(row, column).place]}: ${weightText(value)}` };
  }

  function barList(title, rows, largest) {
    const items = rows.map(([name, value, pick]) => el("li", {},
      el("button", { type: "button", onclick: pick, title: name }, name),
      draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true", class: "figure" },
        draw("rect", { class: `fill ${value < 0 ? "c-purple" : "c-blue"}`, width: (100 * Math.abs(value || 0)) / largest, height: 10 })),
      el("span", {}, weightText(value))));
    return el("div", {}, el("h3", {}, title), el("ul", { class: "bars" }, items));
  }

  function showLists() {
    const { route, at, largest } = weightsOf(state.a, state);
    const site = route.sites.indexOf(state.site);
    const source = route.sources.indexOf(state.source);
    const shown = [];
    if (site >= 0)
      shown.push(barList(`What ${state.site} reads`, route.reads[site].map((place) =>
        [route.sources[place], at(site, place), () => change({ source: route.sources[place] })]), largest));
    if (source >= 0)
      shown.push(barList(`Who reads ${state.source}`, route.sites.map((name, place) => [name, at(place, source), () => change({ site: name })])
        .filter(([, value]) => known(value)), largest));
    lists.replaceChildren(...shown);
  }

  function showReadout() {
    const { route, at, sample } = weightsOf(state.a, state);
    const site = route.sites.indexOf(state.site);
    const source = route.sources.indexOf(state.source);
    let text = "Click a site's name to see what it reads, a source's name to see who reads it, or a cell for both.";
    if (site >= 0 && source >= 0) text = `${state.site} \u2190 ${state.source}: ${weightText(at(site, source))} (${sample})`;
    else if (site >= 0) text = `${state.site} reads ${route.reads[site].length} sources (${sample}).`;
    else if (source >= 0) text = `${state.source} is read by ${route.reads.filter((reads) => reads.includes(source)).length} sites (${sample}).`;
    if (site >= 0 && route.collapsed[site] !== null)
      text += ` Judged collapsed in ${Math.round(100 * route.collapsed[site])} % of the seeds.`;
    readout.textContent = text;
  }

  // Selects are made anew for another design only: a slider that is dragged must not rebuild hundreds of options.
  function showControls() {
    if (bar.of !== state.a) {
      const focused = document.activeElement && document.activeElement.id;
      makeControls();
      bar.of = state.a;
      if (focused && focused.startsWith("explore-")) document.getElementById(focused)?.focus();
    }
    const shown = { ...state, site: state.site || "", source: state.source || "" };
    for (const node of bar.querySelectorAll("select")) node.value = String(shown[node.id.slice("explore-".length)]);
  }

  function makeControls() {
    const { route } = weightsOf(state.a, state);
    const seeds = [[-1, route.seeds.length > 1 ? "mean of seeds" : "mean"], ...route.seeds.map((seed) => [seed, `seed ${seed}`])];
    const others = routed.filter((place) => place !== state.a);
    const named = (places) => places.map((place) => [place, names(place)]);
    const all = (list) => [["", "all"], ...list.map((name) => [name, name])];
    const number = (key) => (value) => change({ [key]: Number(value) });
    bar.replaceChildren(...[
      select("explore-a", "Design", named(routed), state.a, number("a")),
      others.length ? select("explore-b", "beside", [[-1, "none"], ...named(others)], state.b, number("b")) : null,
      route.seeds.length > 1 ? select("explore-seed", "Seed", seeds, state.seed, number("seed")) : null,
      route.views.length > 1 ? select("explore-view", "Lane or head", route.views.map((view) => [view, view]), state.view, (view) => change({ view })) : null,
      select("explore-site", "Site", all(route.sites), state.site || "", (site) => change({ site: site || null })),
      select("explore-source", "Source", all(route.sources), state.source || "", (source) => change({ source: source || null })),
    ].filter((node) => node));
  }

  const slider = el("input", { type: "range", min: 0, value: 0, id: "explore-token", oninput: () => change({ token: Number(slider.value) }) });
  const sliderText = el("output", { for: "explore-token" });
  tokenBar.append(el("label", { for: "explore-token" }, "Token"), slider, sliderText);

  function showTokens() {
    const { route } = weightsOf(state.a, state);
    tokenBar.hidden = tokenStrip.hidden = figures.strip.hidden = !route.tokens;
    if (!route.tokens) return;
    slider.max = route.tokens.length;
    slider.value = state.token;
    sliderText.textContent = state.token ? `${state.token} of ${route.tokens.length}: ${route.tokens[state.token - 1]}` : `all: mean over ${route.sample}`;
    slider.setAttribute("aria-valuetext", sliderText.textContent);
    if (tokenStrip.of !== state.a) {
      tokenStrip.of = state.a;
      tokenStrip.replaceChildren(...route.tokens.map((text, place) => el("button", { type: "button", title: `token ${place + 1}`,
        onclick: () => change({ token: state.token === place + 1 ? 0 : place + 1 }) }, text)));
    }
    [...tokenStrip.children].forEach((button, place) => button.setAttribute("aria-pressed", String(place + 1 === state.token)));
  }

  // Another token only moves the frame around a column.
  function showStrip() {
    const of = JSON.stringify({ ...state, b: null, token: null });
    if (figures.strip.of === of) {
      maps.strip.touch();
      return;
    }
    figures.strip.of = of;
    const wanted = strip();
    captions.strip.replaceChildren(el("strong", {}, wanted.title), el("br"), names(state.a));
    ramps.strip.replaceChildren(ramp(wanted.largest, wanted.signed));
    maps.strip.draw();
  }

  function show() {
    showControls();
    const { sample } = weightsOf(state.a, state);
    const caption = (key) => captions[key].replaceChildren(el("strong", {}, label(state[key])), el("br"), sample);
    caption("a");
    figures.b.hidden = figures.difference.hidden = state.b < 0;
    if (state.b >= 0) {
      caption("b");
      const gap = difference();
      const empty = !gap.rows.length || !gap.columns.length;
      figures.difference.hidden = empty;
      captions.difference.replaceChildren(el("strong", {}, "Difference"), el("br"), "first minus second, where both read");
      ramps.difference.replaceChildren(empty ? "" : ramp(gap.largest, true));
      maps.b.draw();
      if (!empty) maps.difference.draw();
    }
    const own = mapOf("a");
    ramps.a.replaceChildren(ramp(own.largest, own.signed));
    maps.a.draw();
    showTokens();
    if (!figures.strip.hidden) showStrip();
    showLists();
    showReadout();
  }

  const maps = { a: heatMap(() => mapOf("a")), b: heatMap(() => mapOf("b")), difference: heatMap(difference), strip: heatMap(strip) };
  for (const key of ["a", "b", "difference", "strip"])
    figures[key] = el("figure", { "data-map": key }, captions[key], maps[key].node, ramps[key] || null);
  mount.replaceChildren(bar, tokenBar, tokenStrip, el("div", { class: "maps" }, figures.a, figures.b, figures.difference), readout, lists, figures.strip);
  show();
}
