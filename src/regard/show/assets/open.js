/* A page that holds its own data, see page.py.

   Next: held.js */

import { HashAddress } from "./address.js";
import { HeldSource } from "./held.js";
import { Page } from "./map.js";

const textOf = (id) => document.getElementById(id).textContent;
const held = new HeldSource(JSON.parse(textOf("meta")), textOf);
new Page(document.body, held, new HashAddress()).start();
