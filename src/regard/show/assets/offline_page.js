/* A page that holds its own data, see page.py.

   Next: offline_source.js */

import { HashAddress } from "./address.js";
import { HeldSource } from "./offline_source.js";
import { Page } from "./page.js";

const textOf = (id) => document.getElementById(id).textContent;
const held = new HeldSource(JSON.parse(textOf("meta")), textOf);
new Page(document.body, held, new HashAddress()).start();
