"use strict";
// Follows the runs of a live page: fetches the parts that have changed, and sends what its buttons ask for.
(() => {
  const body = document.body, trouble = document.getElementById("trouble"), said = document.getElementById("said");
  let skew = Number(body.dataset.now) - Date.now() / 1000, failures = 0, since = "", timer = 0;
  const wait = () => document.hidden ? 15000 : Math.min(2000 * (1 + failures), 10000);
  const ago = (seconds) => {
    const text = (count, unit) => `${Math.floor(count)} ${unit} ago`;
    return seconds < 60 ? text(Math.max(0, seconds), "s") : seconds < 3600 ? text(seconds / 60, "min")
      : seconds < 172800 ? text(seconds / 3600, "h") : text(seconds / 86400, "days");
  };
  const showTimes = () => {
    for (const one of document.querySelectorAll("time[data-at]")) {
      one.textContent = `last news ${ago(Date.now() / 1000 + skew - Number(one.dataset.at))}`;
      one.title = new Date((Number(one.dataset.at) - skew) * 1000).toLocaleString();
    }
  };
  const say = (element, text) => { element.textContent = text; element.hidden = !text; };
  const isChanged = (one) => "defaultValue" in one && one.value !== one.defaultValue;
  // A part is not replaced while somebody listens to it or writes into it.
  const isBusy = (part) => [...part.querySelectorAll("audio")].some((one) => !one.paused)
    || (part.contains(document.activeElement) && isChanged(document.activeElement));
  // What can be opened, ticked, written into, scrolled or focused in a part or a page, by names that new content has too.
  const named = (root) => {
    const counts = {};
    return [...root.querySelectorAll("details, summary, input, textarea, button, a, audio, figure, .scroll")].map((one) => {
      const place = `${one.closest("[data-part]")?.dataset.part ?? one.closest("section")?.id} ${one.tagName}`;
      counts[place] = (counts[place] ?? 0) + 1;
      return [`${place} ${counts[place]}`, one];
    });
  };
  const stateOf = (root) => Object.fromEntries(named(root).map(([name, one]) => [name, {
    open: one.open, checked: one.checked, value: isChanged(one) ? one.value : undefined, scrollLeft: one.scrollLeft,
    at: one.dataset.at, focused: one === document.activeElement,
  }]));
  const restore = (root, state) => {
    for (const [name, one] of named(root)) {
      const { at, focused, ...values } = state[name] ?? {};
      for (const [key, value] of Object.entries(values)) if (value !== undefined) one[key] = value;
      if (focused) one.focus({ preventScroll: true });
      if (at) one.dispatchEvent(new CustomEvent("values", { bubbles: true, detail: Number(at) }));
    }
  };
  const replace = (part, hash, html) => {
    const state = stateOf(part);
    part.innerHTML = html;
    part.dataset.hash = hash;
    restore(part, state);
  };
  const reload = () => {
    try { sessionStorage.setItem("state", JSON.stringify(stateOf(document))); } catch { /* It may be switched off. */ }
    location.reload();
  };
  const take = (answer) => {
    skew = answer.now - Date.now() / 1000;
    document.title = answer.title;
    const parts = [...document.querySelectorAll("[data-part]")];
    if (answer.order.join() !== parts.map((one) => one.dataset.part).join()) {
      if (!parts.some(isBusy) && !document.querySelector("dialog[open]")) reload();
      return;
    }
    for (const part of parts) {
      const found = answer.parts[part.dataset.part];
      if (found && !isBusy(part)) replace(part, ...found);
    }
    showTimes();
  };
  const problem = (status) => status === 403 ? "The server asks for a token: open the address that it has printed."
    : status === 404 ? "This run is not there any more."
    : status === 503 ? "The disk with this run does not answer. The page goes on by itself as soon as it does."
    : status > 0 ? `The server has an error (${status}), which its terminal shows.`
      : `No answer since ${since}. The page goes on by itself as soon as there is one. If the command has ended: gputrain watch`;
  const update = async () => {
    clearTimeout(timer);
    try {
      const have = [...document.querySelectorAll("[data-part]")].map((one) => one.dataset.hash).join(",");
      const query = new URLSearchParams(location.search);
      if (have.length < 6000) query.set("have", have);
      const answer = await fetch(`update?${query}`, { cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw answer.status;
      take(await answer.json());
      failures = 0;
      since = "";
      say(trouble, "");
    } catch (error) {
      failures += 1;
      since = since || new Date().toLocaleTimeString();
      say(trouble, problem(error));
    }
    timer = setTimeout(update, wait());
  };
  const act = async (element, values) => {
    const question = element.dataset.ask;
    if (question && !confirm(question)) return;
    const run = element.closest("[data-run]");
    const content = { action: element.dataset.action, ...values };
    if (run) content.run = run.dataset.run;
    try {
      const answer = await fetch("act", {
        method: "POST", headers: { "Content-Type": "application/json", "X-Gputrain": "1" }, body: JSON.stringify(content),
      });
      const found = await answer.json();
      say(said, [found.message, found.hint].filter(Boolean).join(" "));
      setTimeout(say, 30000, said, "");
      if (answer.ok) {
        for (const one of element.querySelectorAll("textarea, input")) one.defaultValue = one.value;
      }
    } catch {
      say(said, "The server does not answer: nothing was done.");
    }
    update();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[data-action]");
    if (button) act(button, {});
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-action]");
    if (!form) return;
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    if ("steps" in values) values.steps = Number(values.steps || 0);
    act(form, values);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  addEventListener("online", update);
  try {
    restore(document, JSON.parse(sessionStorage.getItem("state") || "{}"));
    sessionStorage.removeItem("state");
  } catch { /* It may be switched off. */ }
  showTimes();
  setInterval(showTimes, 1000);
  timer = setTimeout(update, wait());
})();
