// Begin: read the data that stands in the page, and draw it.

const pageData = JSON.parse(document.getElementById("report-data").textContent);
if (pageData.mode === "diff") showDiff(pageData);
else showReport(pageData);
document.documentElement.dataset.ready = "true";
