/* index.html as the server sends it.

   Next: page.js */

import { HashAddress } from "./address.js";
import { Page } from "./page.js";
import { HttpSource } from "./source.js";

const token = new URLSearchParams(window.location.search).get("token") ?? "";
const server = new HttpSource(document.baseURI, token);
new Page(document.body, server, new HashAddress()).start();
