// Bar at the top: title, choices, links, and a search field with the shortcut "/".

/** Words of a query in lower case. */
function wordsOf(query) {
  return query.toLowerCase().split(/\s+/).filter(Boolean);
}

function searchBox(found, label) {
  let timer = null;
  const box = h("input", {
    type: "search",
    id: "search",
    placeholder: "Search  ( / )",
    "aria-label": label,
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => found(box.value), 80);
    },
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing) {
      box.focus();
      event.preventDefault();
    } else if (event.key === "Escape" && event.target === box && box.value) {
      box.value = "";
      found("");
    }
  });
  return box;
}

function topBar(title, methods, chosen, search, links) {
  const choice = h(
    "select",
    { "aria-label": "Method", id: "method", onchange: () => chosen(Number(choice.value)) },
    methods.map((name, index) => h("option", { value: index }, name)),
  );
  return h(
    "header",
    { class: "bar" },
    h("h1", {}, title),
    methods.length > 1 ? h("label", { class: "choice" }, "method ", choice) : null,
    h("nav", { "aria-label": "Parts of this page" }, links.map(([id, text]) => h("a", { href: `#${id}` }, text))),
    search,
  );
}
