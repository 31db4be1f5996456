// Draw the data of the page.

const pageData = JSON.parse(document.getElementById("report-data").textContent);
showPage(pageData);
document.documentElement.dataset.ready = "true";
