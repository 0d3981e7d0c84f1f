"use strict";
// Refreshes the numbers on the page every few seconds, while the page is visible and the user is not interacting with
// them.
(() => {
    const INTERVAL = 5000;
    const MARK = "[data-pgqueue-refresh]";

    const isInUse = (part) =>
        part.contains(document.activeElement) ||
        part.querySelector("input.action-select:checked") !== null ||
        document.getSelection().toString() !== "";

    // If two trees have the same shape, only the differences are replaced. This avoids flicker, and keeps checkboxes and
    // listeners.
    const update = (old, fresh) => {
        if (old.isEqualNode(fresh)) {
            return;
        }
        const pairs = [...old.childNodes].map((child, index) => [child, fresh.childNodes[index]]);
        const isAlike = ([one, other]) =>
            one.nodeType === Node.ELEMENT_NODE && one.nodeName === other?.nodeName && one.nodeName !== "svg";
        if (old.childNodes.length !== fresh.childNodes.length || !pairs.every(([a, b]) => a.nodeName === b.nodeName)) {
            old.replaceChildren(...fresh.childNodes);
            return;
        }
        for (const pair of pairs) {
            const [one, other] = pair;
            if (isAlike(pair)) {
                update(one, other);
            } else if (!one.isEqualNode(other)) {
                one.replaceWith(other.cloneNode(true));
            }
        }
    };

    const rows = (part) => [...part.querySelectorAll("input.action-select")].map((box) => box.value).join("\n");

    const refresh = async () => {
        const parts = [...document.querySelectorAll(MARK)];
        if (document.hidden || parts.length === 0 || parts.some(isInUse)) {
            return;
        }
        const answer = await fetch(window.location.href, { credentials: "same-origin", redirect: "error" });
        if (!answer.ok) {
            return;
        }
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of parts) {
            const fresh = page.querySelector(`[data-pgqueue-refresh="${part.dataset.pgqueueRefresh}"]`);
            // Checked again, because the request took some time.
            if (fresh === null || isInUse(part)) {
                continue;
            }
            if (rows(part) === rows(fresh)) {
                update(part, fresh);
            } else {
                part.replaceChildren(...fresh.childNodes);
                // Django's script has its listeners on the old checkboxes.
                window.Actions?.(document.querySelectorAll("tr input.action-select"));
            }
        }
    };

    const run = async () => {
        try {
            await refresh();
        } catch {
            // The server is unavailable. Try again at the next interval.
        }
        window.setTimeout(run, INTERVAL);
    };

    document.addEventListener("DOMContentLoaded", () => {
        if (document.querySelector(MARK) !== null) {
            window.setTimeout(run, INTERVAL);
        }
    });
})();
