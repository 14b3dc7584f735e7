// The page: it reads the data and shows the sections of their kind.
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
main.append(...(data.kind === "plan" ? planPage(data) : runsPage(data)).filter((part) => part !== ""),
  el("footer", { class: "soft small" }, el("p", {}, `Made by shardwright ${data.version}, ${data.made}. 1 GiB is 1,073,741,824 bytes.`)));
