// Asks for the page every two seconds and changes what has changed in the one that is shown.
"use strict";
const EVERY_MS = 2000;
let timer = 0;
let came = performance.now(); // when the page that is shown came

// Make an element like another. Children with keys that stay are kept, so that a selection survives.
function turn(old, now) {
  for (const name of new Set([...old.getAttributeNames(), ...now.getAttributeNames()])) {
    const value = now.getAttribute(name);
    if (value === null) old.removeAttribute(name);
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const key = (node) => node && node.dataset && node.dataset.key;
  const keyed = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  const wanted = [...now.childNodes];
  wanted.forEach((child, at) => {
    const there = old.childNodes[at] || null;
    const alike = key(child) ? keyed.get(key(child)) : key(there) ? null : there;
    if (!alike || alike.nodeName !== child.nodeName) {
      old.insertBefore(child, there);
      return;
    }
    if (alike !== there) old.insertBefore(alike, there);
    if (alike.nodeType === Node.ELEMENT_NODE) turn(alike, child);
    else if (alike.data !== child.data) alike.data = child.data;
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

async function ask() {
  clearTimeout(timer);
  try {
    const answer = await fetch("/", { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = page.title;
    for (const part of ["header", "main", "footer"]) turn(document.querySelector(part), page.querySelector(part));
    came = performance.now();
  } catch { // the server is gone, or its answer was cut short
    const heard = document.getElementById("heard");
    heard.className = "quiet asof lost";
    heard.textContent = `nightgrid watch does not answer. What is shown is ${Math.round((performance.now() - came) / 1000)} s old.`;
  }
  if (!document.hidden) timer = setTimeout(ask, EVERY_MS); // a hidden page asks when it is seen again
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
timer = setTimeout(ask, EVERY_MS);
