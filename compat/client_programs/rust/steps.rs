// What all programs share: the address, the lines of their steps, and requests to the runner.
#![allow(dead_code)] // not each program has all steps

use std::env::{set_var, var};
use std::io::stdin;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How many texts the states have: job:text:000 to job:text:299, each with its number.
pub const TEXTS: usize = 300;
/// Longer than any wait on a busy machine; it ends a hang.
pub const WAIT_MAX: Duration = Duration::from_secs(120);

pub fn place() -> String {
    var("PLACE").unwrap()
}

fn port() -> String {
    var("REDIS_PORT").unwrap()
}

/// The address; with TLS it has the ACL user.
pub fn url() -> String {
    let at = format!("{}:{}", var("REDIS_HOST").unwrap(), port());
    match place().as_str() {
        "tls" => format!("rediss://{}:{}@{at}/", var("REDIS_USER").unwrap(), var("REDIS_PASSWORD").unwrap()),
        _ => format!("redis://{at}/"),
    }
}

/// Have all clients of this process trust the authority of the servers' certificates. Called before any thread starts.
pub fn trust() {
    if let Ok(authority) = var("REDIS_CA") {
        set_var("SSL_CERT_FILE", authority);
    }
}

pub fn text(number: usize) -> String {
    format!("job:text:{number:03}")
}

pub fn all_texts() -> Vec<String> {
    (0..TEXTS).map(text).collect()
}

/// Print what a step returns, or its error.
pub fn step<T: std::fmt::Debug, E: std::fmt::Display>(name: &str, result: Result<T, E>) {
    match result {
        Ok(found) => println!("{name}: {found:?}"),
        Err(error) => println!("{name}: error {}", error_text(&format!("{error}"))),
    }
}

/// Return an error's text in one line, without ports, and without the text of NOPERM, which Redis 7.4 has changed.
fn error_text(error: &str) -> String {
    let text = error.replace(&port(), "PORT").replace('\n', "\\n");
    let denial = ["NoPerm", "NOPERM"].iter().find_map(|code| Some(text.find(code)? + code.len()));
    text[..denial.unwrap_or(text.len())].to_string()
}

/// Ask the runner to put or delete a state's key; wait until it is done.
pub fn ask(words: &str) {
    println!("! {words}");
    let mut answer = String::new();
    assert!(stdin().read_line(&mut answer).unwrap() > 0, "the runner has ended");
}

/// Call until the result is right, and return it; errors meanwhile are no results.
pub fn until<T: std::fmt::Debug, E: std::fmt::Debug>(mut find: impl FnMut() -> Result<T, E>, is_right: impl Fn(&T) -> bool) -> Result<T, String> {
    let end = Instant::now() + WAIT_MAX;
    loop {
        match find() {
            Ok(found) if is_right(&found) => return Ok(found),
            other if Instant::now() > end => return Err(format!("still {other:?}")),
            _ => sleep(Duration::from_millis(10)),
        }
    }
}
