// Runs before the page is drawn: the theme that was chosen here, or else the system's (ui.css).
const chosen = localStorage.getItem("theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
