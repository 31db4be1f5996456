// Select the page for the data.

function showPage(data) {
  if (data.mode === "diff") showDiff(data);
  else showReport(data);
}
