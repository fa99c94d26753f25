//! redis-rs under load: `benchmark-clients PORT PREFIX KEYS`. All tasks share one multiplexed connection, with its
//! default time-out; a task with an optimistic transaction has a connection of its own.
//!
//! Each line of the input is a workload, the number of its tasks, and seconds; the reply to it is a line of JSON.
//! benchmarks/clients/programs.py describes workloads and keys, which are the same for all clients.
use std::collections::HashMap;
use std::io::{stdin, stdout, BufRead, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{cmd, pipe, AsyncCommands, Client, RedisResult};

const MANY_KEYS: u64 = 20;
const PIPELINED_KEYS: u64 = 100;
const FIELDS: usize = 20;
// One map for so many keys.
const KEYS_OF_A_MAP: u64 = 10;

/// The keys of a place. All tasks walk through them together.
struct Keys {
    prefix: String,
    count: u64,
    last: AtomicU64,
}

impl Keys {
    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) % self.count
    }

    fn text(&self, number: u64) -> String {
        format!("{}:text:{}", self.prefix, number % self.count)
    }

    fn value(&self, number: u64) -> String {
        format!("value:{}", number % self.count)
    }

    fn texts(&self, number: u64, count: u64) -> Vec<String> {
        (number..number + count)
            .map(|each| self.text(each))
            .collect()
    }

    fn are_values(&self, found: &[String], number: u64, count: u64) -> bool {
        found.len() as u64 == count
            && found
                .iter()
                .zip(number..)
                .all(|(value, each)| *value == self.value(each))
    }

    fn counter(&self) -> String {
        format!("{}:counter", self.prefix)
    }
}

#[derive(Default)]
struct Outcome {
    requests: u64,
    errors: u64,
    wrong: u64,
    error: String,
}

/// Send one request, or one pipeline or transaction; return whether its reply is right.
async fn call(
    workload: &str,
    keys: &Keys,
    connection: &mut MultiplexedConnection,
) -> RedisResult<bool> {
    let n = keys.next();
    match workload {
        "get" => {
            let found: String = connection.get(keys.text(n)).await?;
            Ok(found == keys.value(n))
        }
        "mget" => {
            let found: Vec<String> = connection.mget(keys.texts(n, MANY_KEYS)).await?;
            Ok(keys.are_values(&found, n, MANY_KEYS))
        }
        "hgetall" => {
            let map = n / KEYS_OF_A_MAP;
            let found: HashMap<String, String> = connection
                .hgetall(format!("{}:map:{map}", keys.prefix))
                .await?;
            Ok(found.len() == FIELDS && found["field:7"] == format!("{map}:7"))
        }
        "pipeline" => {
            let mut gets = pipe();
            for key in keys.texts(n, PIPELINED_KEYS) {
                gets.get(key);
            }
            let found: Vec<String> = gets.query_async(connection).await?;
            Ok(keys.are_values(&found, n, PIPELINED_KEYS))
        }
        "transaction" => {
            let mut gets = pipe();
            gets.atomic().get(keys.text(n)).get(keys.text(n + 1));
            let found: Vec<String> = gets.query_async(connection).await?;
            Ok(keys.are_values(&found, n, 2))
        }
        "set" => {
            let () = connection
                .set(format!("{}:written:{n}", keys.prefix), keys.value(n))
                .await?;
            Ok(true)
        }
        "optimistic" => {
            while !increment(&keys.counter(), connection).await? {}
            Ok(true)
        }
        _ => panic!("there is no workload {workload}"),
    }
}

/// Add one in an optimistic transaction; false: another client has changed the key meanwhile.
async fn increment(key: &str, connection: &mut MultiplexedConnection) -> RedisResult<bool> {
    let () = cmd("WATCH").arg(key).query_async(connection).await?;
    let number: Option<u64> = connection.get(key).await?;
    let mut sets = pipe();
    sets.atomic().set(key, number.unwrap_or(0) + 1).ignore();
    let found: Option<()> = sets.query_async(connection).await?;
    Ok(found.is_some())
}

async fn task(
    workload: String,
    keys: Arc<Keys>,
    mut connection: MultiplexedConnection,
    ends: Instant,
) -> Outcome {
    let mut own = Outcome::default();
    while own.requests == 0 || Instant::now() < ends {
        own.requests += 1;
        match call(&workload, &keys, &mut connection).await {
            Ok(true) => {}
            Ok(false) => own.wrong += 1,
            Err(error) => {
                own.errors += 1;
                own.error = error.to_string();
            }
        }
    }
    own
}

struct Program {
    client: Client,
    shared: MultiplexedConnection,
    keys: Arc<Keys>,
}

impl Program {
    /// Measure a workload. The counter of optimistic transactions must have grown by their number.
    async fn run(
        &mut self,
        workload: &str,
        tasks: usize,
        seconds: f64,
    ) -> RedisResult<serde_json::Value> {
        let is_optimistic = workload == "optimistic";
        let mut connections = Vec::new();
        for _ in 0..tasks {
            connections.push(match is_optimistic {
                true => self.client.get_multiplexed_async_connection().await?,
                false => self.shared.clone(),
            });
        }
        let before: u64 = self.counter(is_optimistic).await?;
        let began = Instant::now();
        let ends = began + Duration::from_secs_f64(seconds);
        let running: Vec<_> = connections
            .into_iter()
            .map(|each| tokio::spawn(task(workload.to_owned(), self.keys.clone(), each, ends)))
            .collect();
        let mut total = Outcome::default();
        for each in running {
            let own = each.await.expect("a task has failed");
            total.requests += own.requests;
            total.errors += own.errors;
            total.wrong += own.wrong;
            if !own.error.is_empty() {
                total.error = own.error;
            }
        }
        let took = began.elapsed().as_secs_f64();
        if is_optimistic && self.counter(true).await? - before != total.requests - total.errors {
            total.wrong += 1;
        }
        Ok(serde_json::json!({
            "requests": total.requests, "seconds": took, "errors": total.errors, "wrong": total.wrong, "error": total.error
        }))
    }

    async fn counter(&mut self, is_asked: bool) -> RedisResult<u64> {
        if !is_asked {
            return Ok(0);
        }
        let found: Option<u64> = self.shared.get(self.keys.counter()).await?;
        Ok(found.unwrap_or(0))
    }
}

#[tokio::main]
async fn main() -> RedisResult<()> {
    let given: Vec<String> = std::env::args().collect();
    let [_, port, prefix, count] = &given[..] else {
        panic!("usage: benchmark-clients PORT PREFIX KEYS")
    };
    let client = Client::open(format!("redis://127.0.0.1:{port}"))?;
    let shared = client.get_multiplexed_async_connection().await?;
    let count = count.parse().expect("KEYS is a number");
    let keys = Arc::new(Keys {
        prefix: prefix.clone(),
        count,
        last: AtomicU64::new(0),
    });
    let mut program = Program {
        client,
        shared,
        keys,
    };
    for line in stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let (tasks, seconds) = (
            words[1].parse().expect("a number of tasks"),
            words[2].parse().expect("seconds"),
        );
        println!("{}", program.run(words[0], tasks, seconds).await?);
        stdout().flush()?;
    }
    Ok(())
}
