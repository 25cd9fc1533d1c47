// Add a button to each listing that copies its text without prompts and output.
document.addEventListener("DOMContentLoaded", () => {
  for (const listing of document.querySelectorAll("div.highlight")) {
    const code = listing.querySelector("pre");
    if (!code || !navigator.clipboard) continue;
    const button = document.createElement("button");
    button.className = "copy-listing";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy the listing");
    button.addEventListener("click", async () => {
      const lines = code.innerText.replace(/\n$/, "").split("\n");
      const isSession = lines.some((line) => line.startsWith(">>> "));
      const kept = lines.filter((line) => !isSession || /^(>>>|\.\.\.)( |$)/.test(line));
      await navigator.clipboard.writeText(kept.map((line) => (isSession ? line.slice(4) : line)).join("\n"));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    listing.appendChild(button);
  }
});
