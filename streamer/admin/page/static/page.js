"use strict";

// Keeps an open page up to date. Everything else works without it.
//
// The server reports every event on /api/events. From the values of an event, the script updates lag,
// rates and the progress of copies. For all else the script fetches the page again, and Idiomorph
// changes what differs in the [data-live] parts, so focus, scrolling and unfolded parts stay. An
// element with an id stays the same element when it moves.

const SLOW_MS = 10000; // interval for WAL and quarantine, which no event reports
const SOON_MS = 300;
const RATES_MAX = 120;

const $ = (selector, root = document) => [...root.querySelectorAll(selector)];
const by = (name, value) => $(`[data-${name}]`).filter((e) => e.getAttribute(`data-${name}`) === value);

// ---- numbers, as streamer/admin/page/number_text.py writes them -------------------------------------

function count(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

function size(value) {
  let unit = 0;
  while (value >= 1000 && unit < 4) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)}\u00a0${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)}\u00a0s`;
  if (seconds < 90) return `${seconds.toFixed(0)}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes}\u00a0min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)}\u00a0h${minutes % 60 ? ` ${minutes % 60}\u00a0min` : ""}`;
  const hours = Math.round(minutes / 60);
  return `${Math.floor(hours / 24)}\u00a0d${hours % 24 ? ` ${hours % 24}\u00a0h` : ""}`;
}

function latency(seconds) {
  return seconds >= 0.9995 ? duration(seconds) : `${(seconds * 1000).toFixed(0)}\u00a0ms`;
}

function rate(value) {
  return value > 0 && value < 10 ? `${value.toFixed(1)}/s` : `${count(value)}/s`;
}

function put(elements, text) {
  for (const element of elements) if (element.textContent !== text) element.textContent = text;
}

// ---- rates -----------------------------------------------------------------------------------

const rates = new Map();

function drawRates() {
  for (const element of $("[data-rate]")) put([element], rate((rates.get(element.dataset.rate) || []).at(-1) || 0));
  for (const svg of $("[data-spark]")) {
    const values = rates.get(svg.dataset.spark) || [];
    const top = Math.max(1, ...values);
    const points = values.map((value, i) => `${RATES_MAX - values.length + i},${(23 - (value / top) * 22).toFixed(1)}`);
    if (points.length < 2) continue;
    let [area, line] = svg.children;
    if (!line) {
      area = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polygon"));
      line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
    }
    line.setAttribute("points", points.join(" "));
    area.setAttribute("points", `${RATES_MAX - values.length},23 ${points.join(" ")} ${RATES_MAX - 1},23`);
  }
}

const current = new Map();

function tick() {
  for (const [label, values] of rates) {
    values.push(current.get(label) || 0);
    if (values.length > RATES_MAX) values.shift();
  }
  drawRates();
}

// ---- changing differing parts ----------------------------------------------------------------

const EDITED = ":is(input:not([type=hidden]), select, textarea)"; // the user may be editing it
const DRAWN = "[data-spark], [data-rate]"; // this script draws the content

const callbacks = {
  beforeNodeMorphed: (old) => old.nodeType !== 1 || !old.matches(`${EDITED}, ${DRAWN}`),
  beforeNodeRemoved: (old) => old.nodeType !== 1 || !old.matches(".copy"),
  beforeAttributeUpdated: (name, old) => name !== "open" || old.nodeName !== "DETAILS",
};

let refreshing = false;
let refreshAgain = false;
let refreshTimer = 0;
let refreshedAt = Date.now();

async function refresh() {
  clearTimeout(refreshTimer);
  refreshTimer = 0;
  if (refreshing) {
    refreshAgain = true;
    return;
  }
  refreshing = true;
  try {
    const response = await fetch(location.href, { headers: { "X-Refresh": "1", Accept: "text/html" }, cache: "no-store" });
    if (response.redirected) return location.reload(); // to log in again
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    const parts = $("[data-live]", fresh);
    if (response.ok && parts.length) {
      const focused = document.activeElement;
      for (const part of parts) for (const old of by("live", part.dataset.live)) Idiomorph.morph(old, part, { callbacks });
      if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
      if (fresh.title) document.title = fresh.title;
      // A page of a different process has a different token.
      const token = fresh.querySelector("input[name=csrf]");
      if (token) for (const input of $("input[name=csrf]")) input.value = token.value;
      addCopyButtons();
      showTools();
      drawRates();
    } else if (response.ok || response.status === 404) {
      location.reload(); // the address shows a different page now
    }
  } catch {
    // The page already shows that the server does not answer.
  } finally {
    refreshing = false;
    refreshedAt = Date.now();
    if (refreshAgain) {
      refreshAgain = false;
      soon();
    }
  }
}

// The fleet overview takes its figures from the page alone, so the script requests brief events.
const isBrief = $("[data-brief]").length > 0;
const AGAIN_MS = isBrief ? 5000 : 2000;

function soon() {
  // Refresh at most once in this time, for any number of events.
  const wait = Math.max(SOON_MS, AGAIN_MS - (Date.now() - refreshedAt));
  refreshTimer ||= setTimeout(refresh, wait);
}

// ---- events ----------------------------------------------------------------------------------

function rowsOf(source, table) {
  return by("table", table).filter((row) => row.dataset.source === source);
}

const on = {
  snapshot(data) {
    for (const { source, changes_per_second: values } of data.rates) {
      rates.set(source, values.slice(-RATES_MAX));
      current.set(source, values.at(-1) || 0);
    }
    data.lag.forEach(on.lag);
    drawRates();
    soon(); // events may be missing while disconnected
  },
  lag({ source, lag_bytes: bytes, lag_seconds: seconds }) {
    put(by("lag-seconds", source), latency(seconds));
    put(by("lag-bytes", source), size(bytes));
  },
  rate({ source, changes_per_second: value }) {
    if (!rates.has(source)) rates.set(source, []);
    current.set(source, value);
  },
  progress({ source, table, rows_copied: rows, rows_total: total, bytes_copied: bytes, bytes_total: all }) {
    for (const row of rowsOf(source, table)) {
      put($("[data-rows]", row), `${count(rows)}${total ? ` of about ${count(total)}` : ""} rows`);
      const part = all ? bytes / all : total ? rows / total : 0;
      for (const bar of $("progress", row)) bar.value = Math.min(1000, Math.round(part * 1000));
    }
    soon(); // for the rate, and the remaining time
  },
  target: soon,
  state: soon,
  verified: soon,
  draft: soon,
  applied: soon,
};

let events = null;
let ticking = 0;

function say(text, isOn) {
  const place = document.getElementById("connection");
  if (!place) return;
  put([place], text);
  place.className = `live ${isOn ? "on" : "off"}`;
}

function eventsAddress() {
  if (isBrief) return "/api/events?brief=true";
  const [only] = $("[data-only]");
  return only ? `/api/events?source=${encodeURIComponent(only.dataset.only)}` : "/api/events";
}

function listen() {
  if (events) return;
  events = new EventSource(eventsAddress());
  events.onopen = () => say("live", true);
  events.onerror = () => {
    say("not live", false);
    if (events && events.readyState === EventSource.CLOSED) {
      stop();
      setTimeout(() => {
        if (document.visibilityState === "visible") {
          listen();
          refresh();
        }
      }, 5000);
    }
  };
  for (const name of Object.keys(on)) {
    events.addEventListener(name, (event) => on[name](JSON.parse(event.data)));
  }
  ticking = setInterval(() => {
    tick();
    if (Date.now() - refreshedAt > SLOW_MS) refresh();
  }, 1000);
}

function stop() {
  clearInterval(ticking);
  if (events) events.close();
  events = null;
}

if ($("[data-live]").length) {
  // A hidden page sends no requests.
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") listen();
    else stop();
  });
  addEventListener("pagehide", stop);
  addEventListener("pageshow", () => {
    if (document.visibilityState === "visible") listen();
  });
}

// ---- keys ------------------------------------------------------------------------------------

const KEY_MS = 1500; // the longest pause between the two keys of a place
const PLACES = { o: "/", e: "/events" };
const keys = document.getElementById("keys");
let goPressedAt = -Infinity;

function search() {
  const [field] = $("[role=search] :is(input[type=search], select), input[data-filter]");
  if (!field) return location.assign("/?view=wall#search");
  field.focus();
  field.select?.();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || keys.open) return;
  if (event.target.closest?.("input:not([type=checkbox], [type=radio]), select, textarea")) return;
  const place = event.timeStamp - goPressedAt < KEY_MS ? PLACES[event.key] : undefined;
  goPressedAt = event.key === "g" ? event.timeStamp : -Infinity;
  if (place) location.assign(place);
  else if (event.key === "/") search();
  else if (event.key === "?") keys.showModal();
  else return;
  event.preventDefault();
}

if (keys) {
  addEventListener("keydown", onKey);
  for (const button of $("[data-keys]")) button.addEventListener("click", () => keys.showModal());
  for (const button of $("[data-close]")) button.addEventListener("click", () => keys.close());
}

// A phone shows the present page in the row of pages. To scroll the window would lose the reader's place.
function showPresentPage() {
  for (const link of $(".top nav [aria-current]")) {
    link.parentElement.scrollLeft = link.offsetLeft - 24;
  }
}
showPresentPage();
addEventListener("resize", showPresentPage);

// ---- small comforts --------------------------------------------------------------------------

function addCopyButtons() {
  if (!navigator.clipboard) return;
  for (const block of $("pre[data-copy]")) {
    if (block.querySelector("button")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.firstChild.textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.append(button);
  }
}
addCopyButtons();

// A link from another site comes without the session cookie. A user with a session need not log in again.
for (const after of $("form[action='/login'] input[name=next]")) {
  fetch("/mapping", { redirect: "manual" }).then((response) => {
    if (response.ok) location.replace(new URL(after.value, location.origin));
  });
}

// A note about a change appears once, not at every reload.
const address = new URL(location.href);
if (address.searchParams.has("note")) {
  address.searchParams.delete("note");
  history.replaceState(null, "", address);
}

for (const form of $("form[data-slow]")) {
  form.addEventListener("submit", (event) => {
    const button = event.submitter;
    if (!button) return;
    // Disable the button after the form is sent: a disabled button does not send its value.
    setTimeout(() => {
      button.disabled = true;
      button.textContent = form.dataset.slow;
    }, 0);
  });
}

function showTools() {
  for (const tools of $("[data-tools]")) tools.hidden = false;
}
showTools();

for (const input of $("[data-filter]")) {
  const rows = () => [...document.getElementById(input.dataset.filter).rows];
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows()) row.hidden = !row.dataset.text.toLowerCase().includes(wanted);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") event.preventDefault();
  });
}

for (const button of $("[data-tick]")) {
  button.addEventListener("click", () => {
    const boxes = $("input[name=pick]", document.getElementById(button.dataset.tick)).filter((b) => !b.closest("tr").hidden);
    const value = !boxes.every((box) => box.checked);
    for (const box of boxes) box.checked = value;
  });
}
