"use strict";
// Shows new notes, and posts a note without leaving the page.
(() => {
    const REOPEN_DELAY = 2000;
    const list = document.getElementById("notes");
    const state = document.getElementById("state");
    const form = document.getElementById("form");
    const error = document.getElementById("error");

    const idOf = (item) => Number(item.dataset.id);

    // The newest note is first. A note can arrive twice, and a smaller id after a larger one.
    const show = (note) => {
        const next = [...list.children].find((item) => idOf(item) <= note.id);
        if (next && idOf(next) === note.id) {
            return;
        }
        const item = document.createElement("li");
        item.dataset.id = note.id;
        item.textContent = note.text;
        list.insertBefore(item, next ?? null);
        while (list.children.length > Number(list.dataset.maxNotes)) {
            list.lastElementChild.remove();
        }
    };

    const setState = (word) => {
        state.textContent = word;
        state.className = word;
    };

    const open = () => {
        const newest = list.firstElementChild;
        const source = new EventSource(`${list.dataset.stream}?after=${newest ? idOf(newest) : 0}`);
        source.onopen = () => setState("live");
        source.onmessage = (event) => show(JSON.parse(event.data));
        source.onerror = () => {
            setState("connecting");
            // A browser reconnects after a lost connection, but not after a response such as 502.
            if (source.readyState === EventSource.CLOSED) {
                setTimeout(open, REOPEN_DELAY);
            }
        };
    };

    form.addEventListener("submit", async (event) => {
        event.preventDefault();
        error.textContent = "";
        const body = new FormData(form);
        try {
            // The response to a successful post is a redirect to this page, which is not followed.
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
