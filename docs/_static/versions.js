// Fills the list of versions from versions.json, which scripts/publish_site.py writes next to the folders of the versions.
document.addEventListener("DOMContentLoaded", async () => {
  const box = document.getElementById("versions");
  const root = new URL(document.documentElement.dataset.content_root || ".", location.href);
  const here = root.pathname.replace(/\/$/, "").split("/").pop();
  if (!box || !root.protocol.startsWith("http") || !/^\d+\.\d/.test(here)) return;
  let versions;
  try {
    const answer = await fetch(new URL("../versions.json", root));
    if (!answer.ok) return;
    versions = await answer.json();
  } catch {
    return; // this copy of the site is alone
  }
  if (!versions.includes(here)) return;
  const list = box.querySelector("select");
  for (const version of versions) list.add(new Option(version, version, false, version === here));
  list.addEventListener("change", async () => {
    const page = location.href.slice(root.href.length);
    const other = new URL(`../${list.value}/`, root);
    const same = new URL(page, other);
    const known = await fetch(same, { method: "HEAD" }).then((answer) => answer.ok, () => false);
    location.href = known ? same : other;
  });
  box.hidden = false;
});
