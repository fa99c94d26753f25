// The page in the browser: takes the parts that move from a socket, the keys of the keyboard, the copy buttons.
// All texts were escaped by the server's templates; nothing here makes markup of a text.
"use strict";

const RETRY_MS = 2000;
const NO_ANSWER_MS = 3000;
const SIGN_IN_CODE = 4401;

const live = document.getElementById("live");
let socket = null;
let lostAt = 0;

function listen() {
  if (!live || !live.dataset.live || socket || document.hidden) return;
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(`${scheme}//${location.host}${live.dataset.live}${location.search}`);
  socket.onmessage = (event) => {
    lostAt = 0;
    document.getElementById("away").hidden = true;
    const fresh = document.createElement("div");
    fresh.append(...new DOMParser().parseFromString(event.data, "text/html").body.childNodes);
    morph(live, fresh);
  };
  socket.onclose = (event) => {
    socket = null;
    if (event.code === SIGN_IN_CODE) return location.reload();
    if (document.hidden) return;
    lostAt ||= Date.now();
    if (Date.now() - lostAt > NO_ANSWER_MS) document.getElementById("away").hidden = false;
    setTimeout(listen, RETRY_MS);
  };
}

// A tab that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && socket) socket.close();
  else listen();
});

// Makes the children of one element like those of another one, and keeps the elements, so that what is selected,
// focused or folded stays so. An element with an id keeps its place by its id.
function morph(old, fresh) {
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const kept = match(old, at, wanted);
    if (!kept) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (kept !== at) old.insertBefore(kept, at);
    else at = at.nextSibling;
    update(kept, wanted);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function match(old, at, wanted) {
  if (wanted.id) {
    for (let each = at; each; each = each.nextSibling) if (each.id === wanted.id) return each;
    return null;
  }
  return at && at.nodeType === wanted.nodeType && at.nodeName === wanted.nodeName && !at.id ? at : null;
}

function update(kept, wanted) {
  if (kept.nodeType !== Node.ELEMENT_NODE) {
    if (kept.nodeValue !== wanted.nodeValue) kept.nodeValue = wanted.nodeValue;
    return;
  }
  const isChanged = "flash" in kept.dataset && kept.textContent !== wanted.textContent;
  for (const { name, value } of [...wanted.attributes]) {
    if (kept.getAttribute(name) !== value && name !== "open") kept.setAttribute(name, value);
  }
  for (const { name } of [...kept.attributes]) {
    if (!wanted.hasAttribute(name) && name !== "open") kept.removeAttribute(name);
  }
  morph(kept, wanted);
  if (isChanged) {
    kept.classList.add("changed");
    setTimeout(() => kept.classList.remove("changed"), 900);
  }
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

function showHelp() {
  document.getElementById("help")?.showModal();
}

// A page over plain http, of another machine, has no clipboard: there the browser copies what is selected.
async function copy(code) {
  if (navigator.clipboard) return navigator.clipboard.writeText(code.textContent);
  getSelection().selectAllChildren(code);
  document.execCommand("copy");
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if ("themeSwitch" in button.dataset) switchTheme();
  if ("help" in button.dataset) showHelp();
  if ("copy" in button.dataset) {
    await copy(button.parentElement.querySelector("code"));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
});

// A choice in a list searches at once. A state belongs to its job, so another job begins with all states.
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-auto]");
  if (!form || event.target.tagName !== "SELECT") return;
  if (event.target.name === "job") form.elements.state.value = "";
  form.requestSubmit();
});

// Empty fields are left out of the URL.
document.addEventListener("submit", (event) => {
  if (event.target.method !== "get") return;
  for (const each of event.target.elements) if (each.name && !each.value) each.disabled = true;
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "n") document.querySelector("a[rel=next]")?.click();
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showHelp();
  else if (/^[1-9]$/.test(event.key)) document.querySelector(`nav a[data-key="${event.key}"]`)?.click();
  else return;
  event.preventDefault();
});

// A page that the browser took out of its cache of pages listens again, and its fields are of use again.
window.addEventListener("pageshow", () => {
  for (const each of document.querySelectorAll("form[method=get] :disabled")) each.disabled = each.tagName === "SELECT" && each.options.length < 2;
  listen();
});
