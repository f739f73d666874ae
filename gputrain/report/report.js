"use strict";
// The page is complete without this script, which adds values under the pointer or at the arrow keys, pictures at full
// size, switching between sounds, and copying.
(() => {
  const shown = (value, unit) => {
    const scaled = unit === "%" ? 100 * value : value;
    const size = Math.abs(scaled);
    const digits = size !== 0 && (size < 1e-3 || size >= 1e7) ? scaled.toExponential(2)
      : size >= 1000 ? Math.round(scaled).toLocaleString("en") : String(Number(scaled.toPrecision(4)));
    return unit ? `${digits} ${unit}` : digits;
  };
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };
  const span = (kind, text) => { // Names that are written from right to left stand alone.
    const one = document.createElement("span");
    one.className = kind; one.textContent = text;
    return one;
  };
  const isHidden = (run) => {
    const box = document.getElementById(`run-${run}`);
    return box && !box.checked;
  };
  let figure = null; // The chart that shows values, those at the step of its data-at.
  const hide = () => {
    if (!figure) return;
    const rule = figure.querySelector(".rule");
    figure.querySelector(".tip").hidden = true;
    delete figure.dataset.at;
    rule.setAttribute("x1", -9); rule.setAttribute("x2", -9);
    figure = null;
  };
  const show = (chart, step) => {
    if (chart !== figure) hide();
    const data = JSON.parse(chart.dataset.chart), box = chart.querySelector("svg").getBoundingClientRect();
    const found = data.curves.filter((curve) => !isHidden(curve.run))
      .map((curve) => [curve, nearest(curve.points, step)]);
    if (!found.length) return hide();
    const rule = chart.querySelector(".rule"), tip = chart.querySelector(".tip");
    figure = chart;
    const at = found.map(([, point]) => point[0]).reduce((a, b) => Math.abs(a - step) <= Math.abs(b - step) ? a : b);
    chart.dataset.at = at;
    const place = data.left + (data.right - data.left) * at / Math.max(1, data.reach);
    rule.setAttribute("x1", place); rule.setAttribute("x2", place);
    const lasting = found.filter(([curve]) => at <= curve.points.at(-1)[0] + data.reach / 50); // A mean is further left.
    tip.replaceChildren(...[`step ${at.toLocaleString("en")}`, ...lasting].map((line) => {
      const row = document.createElement("div");
      if (typeof line === "string") { row.textContent = line; return row; }
      const [curve, point] = line, names = curve.letter || data.curves.length > 1 ? [span("", `${curve.label}:`)] : [];
      row.append(span(`dot c${curve.run % 6}`, curve.letter), ...names, shown(point[1], data.unit));
      return row;
    }));
    tip.hidden = false;
    const right = place > (data.left + data.right) / 2;
    tip.style.left = right ? "auto" : `${place / data.width * box.width + 24}px`;
    tip.style.right = right ? `${(1 - place / data.width) * box.width + 24}px` : "auto";
  };
  const point = (event) => {
    const svg = event.target.closest?.("figure.chart svg");
    if (!svg) return hide();
    const chart = svg.parentElement, data = JSON.parse(chart.dataset.chart), box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * data.width / box.width;
    show(chart, Math.round((x - data.left) / (data.right - data.left) * Math.max(1, data.reach)));
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("focusin", (event) => {
    const chart = event.target; // It may have got its values before the window has the focus.
    if (chart !== figure && chart.matches?.("figure.chart:focus-visible")) show(chart, Number.MAX_SAFE_INTEGER);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("values", (event) => show(event.target, event.detail)); // A live page has replaced it.
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest?.("figure.chart"), left = event.key === "ArrowLeft";
    if (!chart || !(left || event.key === "ArrowRight")) return;
    event.preventDefault();
    const at = Number(chart.dataset.at ?? Infinity);
    const steps = JSON.parse(chart.dataset.chart).curves.flatMap((curve) => curve.points.map(([step]) => step));
    const further = steps.filter((step) => left ? step < at : step > at);
    if (further.length) show(chart, left ? Math.max(...further) : Math.min(...further));
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button.copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  document.documentElement.classList.add("scripted", ...(navigator.clipboard ? ["copies"] : []));
})();
// One player for the sounds of a row: another sound goes on where the one before it is.
(() => {
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button.hear"), row = button?.closest(".sound");
    if (!row) return;
    const before = row.querySelector("audio.chosen"), buttons = [...row.querySelectorAll(".hear")];
    const next = row.querySelectorAll("audio")[buttons.indexOf(button)];
    if (next === before && !next.paused) return next.pause();
    if (next !== before) {
      [next.currentTime, next.volume] = [before.ended ? 0 : before.currentTime, before.volume];
      before.classList.remove("chosen"); next.classList.add("chosen");
      for (const one of buttons) one.setAttribute("aria-pressed", one === button);
    }
    next.play().catch(() => {}); // Another one may be asked for before it begins.
  });
  document.addEventListener("play", (event) => {
    for (const one of document.querySelectorAll("audio")) if (one !== event.target) one.pause();
  }, true);
})();
// Pictures at full size: an original and what was made of it, with a border to move, by step and by picture.
(() => {
  const viewer = document.getElementById("viewer"), part = (selector) => viewer.querySelector(selector);
  const frame = part(".frame"), stage = part(".stage"), border = part(".border"), whole = part(".whole");
  const steps = part(".steps input");
  let name = "", title = "", at = 0; // What is shown, by texts: an update of a live page replaces the elements.
  const titleOf = (figure) => figure?.querySelector("b").textContent;
  const move = () => stage.style.setProperty("--at", `${border.value}%`);
  const fit = () => { // In pixels of the screen; small pictures are enlarged by whole factors, which show their pixels.
    const [width, height] = ["width", "height"].map((key) => part(".made")?.getAttribute(key) / devicePixelRatio);
    const scale = Math.min(frame.clientWidth / width, frame.clientHeight / height);
    whole.parentElement.hidden = scale >= 2;
    stage.classList.toggle("enlarged", scale >= 2);
    stage.style.width = `${width * (scale >= 2 ? Math.floor(scale) : whole.checked ? 1 : scale)}px`;
  };
  const show = (further = 0, later = 0) => { // By so many pictures or steps.
    const items = [...document.querySelectorAll("[data-item]")];
    const place = items.findIndex((one) => one.dataset.item === name) + further, item = items[place];
    if (!item) return further || viewer.close();
    const all = [...item.querySelectorAll("figure.made")].reverse(), before = item.querySelector("figure.original");
    const found = all.findIndex((one) => titleOf(one) === title); // The newest, the last one, if it has left.
    at = Math.min(all.length - 1, Math.max(0, (found < 0 ? all.length - 1 : found) + later));
    [name, title] = [item.dataset.item, titleOf(all[at])];
    for (const one of stage.querySelectorAll("img")) one.remove();
    for (const figure of [before, all[at]]) {
      const image = figure?.querySelector("img").cloneNode();
      if (image) stage.prepend(Object.assign(image, { className: figure.className, decoding: "sync" }));
    }
    for (const one of [border, ...stage.querySelectorAll("b")]) one.hidden = !before;
    [part(".left").textContent, part(".right").textContent] = [titleOf(before), title];
    const captions = [before, all[at]].map((one) => one?.querySelector("figcaption span").textContent);
    part("h2").textContent = [item.getAttribute("aria-label"), title, ...captions].filter(Boolean).join(" · ");
    part(".steps").hidden = all.length < 2;
    [steps.max, steps.value] = [all.length - 1, at];
    steps.setAttribute("aria-valuetext", title);
    for (const one of viewer.querySelectorAll("[data-later]")) one.disabled = !all[at + Number(one.dataset.later)];
    for (const one of viewer.querySelectorAll("[data-further]")) {
      one.disabled = !items[place + Number(one.dataset.further)];
    }
    fit();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button.enlarge, #viewer button"), figure = button?.closest("figure");
    if (figure) {
      [name, title] = [button.closest("[data-item]").dataset.item, figure.matches(".made") ? titleOf(figure) : ""];
      viewer.showModal();
      border.value = 50;
      move();
    }
    if (button) show(Number(button.dataset.further ?? 0), Number(button.dataset.later ?? 0));
    if (figure) (border.hidden ? steps : border).focus();
  });
  const keys = { ArrowUp: [0, 1], ArrowDown: [0, -1], PageUp: [-1, 0], PageDown: [1, 0] };
  viewer.addEventListener("keydown", (event) => {
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (keys[event.key]) show(...keys[event.key]);
    else if (side && event.target.type !== "range") border.value = Number(border.value) + side;
    else return;
    event.preventDefault();
    move();
  });
  viewer.addEventListener("close", () => document.querySelector(`[data-item="${name}"] .made button`)?.focus());
  border.addEventListener("input", move);
  steps.addEventListener("input", () => show(0, steps.value - at));
  whole.addEventListener("change", fit);
  addEventListener("resize", fit);
})();
