"use strict";
// Shows notes as they come, and posts without leaving the page.
(() => {
    const REOPEN = 2000;
    const list = document.getElementById("notes");
    const state = document.getElementById("state");
    const form = document.getElementById("form");
    const error = document.getElementById("error");

    const idOf = (item) => Number(item.dataset.id);

    // The newest stand first. A note may be told twice, and a smaller number after a larger one.
    const show = (note) => {
        const next = [...list.children].find((item) => idOf(item) <= note.id);
        if (next && idOf(next) === note.id) {
            return;
        }
        const item = document.createElement("li");
        item.dataset.id = note.id;
        item.textContent = note.text;
        list.insertBefore(item, next ?? null);
        while (list.children.length > Number(list.dataset.most)) {
            list.lastElementChild.remove();
        }
    };

    const tell = (word) => {
        state.textContent = word;
        state.className = word;
    };

    const open = () => {
        const newest = list.firstElementChild;
        const source = new EventSource(`${list.dataset.stream}?after=${newest ? idOf(newest) : 0}`);
        source.onopen = () => tell("live");
        source.onmessage = (event) => show(JSON.parse(event.data));
        source.onerror = () => {
            tell("connecting");
            // After a lost connection a browser comes back by itself, after an answer such as 502 it does not.
            if (source.readyState === EventSource.CLOSED) {
                setTimeout(open, REOPEN);
            }
        };
    };

    form.addEventListener("submit", async (event) => {
        event.preventDefault();
        error.textContent = "";
        const body = new FormData(form);
        try {
            // What is posted well is answered by a redirect to the page, which is open already.
            const answer = await fetch(form.action, { method: "POST", body, redirect: "manual" });
            if (answer.type === "opaqueredirect") {
                form.reset();
            } else {
                error.textContent = `Not posted: ${answer.status}.`;
            }
        } catch {
            error.textContent = "Not posted: the server cannot be reached.";
        }
    });

    open();
})();
