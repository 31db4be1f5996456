// Which page to draw.

function showPage(data) {
  if (data.mode === "diff") showDiff(data);
  else showReport(data);
}
