// redis-rs: the synchronous client, and the one for tokio; the cluster's client of both kinds.
#[path = "../../steps.rs"]
mod steps;

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::thread::spawn;
use std::time::Duration;

use redis::cluster::{cluster_pipe, ClusterClient};
use redis::{cmd, pipe, AsyncCommands, Client, Commands, Connection, RedisResult, Script, Value};
use steps::*;
use tokio::time::timeout;

fn main() {
    trust();
    if place() == "cluster" {
        return cluster();
    }
    let client = Client::open(url()).unwrap();
    let mut own = client.get_connection().unwrap();
    texts(&mut own);
    if place() != "tls" {
        reads(&mut own);
        changes(&client, &mut own);
    }
    tokio::runtime::Runtime::new().unwrap().block_on(tokio_reads(&client));
    if place() == "upstream" {
        writes(&client, &mut own);
    } else {
        step("a refused write", own.set::<_, _, ()>(text(7), "x"));
        step("a read after it", own.get::<_, String>(text(7)));
    }
    let mut other = client.get_connection().unwrap();
    let id: i64 = cmd("CLIENT").arg("ID").query(&mut own).unwrap();
    let killed: RedisResult<i64> = cmd("CLIENT").arg("KILL").arg("ID").arg(id).query(&mut other);
    step("CLIENT KILL", killed);
    step("a killed connection fails", Ok::<_, String>(own.get::<_, String>(text(7)).is_err()));
    step("a new one", client.get_connection().and_then(|mut new| new.get::<_, String>(text(7))));
}

fn texts(own: &mut Connection) {
    step("GET", own.get::<_, String>(text(7)));
    step("a missing key", own.get::<_, Option<String>>("job:text:none"));
    step("MGET", own.mget::<_, Vec<Option<String>>>(&[text(1), "job:text:none".into(), text(299)]));
    step("STRLEN", own.strlen::<_, usize>("job:text:long"));
    let mut pipeline = pipe();
    all_texts().iter().for_each(|key| {
        pipeline.get(key);
    });
    step("a pipeline", pipeline.query::<Vec<String>>(own));
    step("EXISTS", own.exists::<_, bool>(text(7)));
    step("TTL", own.ttl::<_, i64>(text(7)));
    step("WRONGTYPE", own.hgetall::<_, BTreeMap<String, String>>(text(7)));
    step("a key of others", own.hlen::<_, i64>("job:map:flight"));
}

fn reads(own: &mut Connection) {
    step("HGETALL", own.hgetall::<_, BTreeMap<String, String>>("job:map:flight"));
    step("HSCAN", own.hscan::<_, (String, String)>("job:map:large").map(|all| all.filter_map(Result::ok).collect::<BTreeMap<_, _>>().len()));
    step("LRANGE", own.lrange::<_, Vec<String>>("job:list:alerts", 0, -1));
    step("SMEMBERS", own.smembers::<_, std::collections::BTreeSet<String>>("job:set:airports"));
    step("ZRANGE", own.zrange_withscores::<_, Vec<(String, f64)>>("job:ranks:delays", 0, -1));
    step("MULTI", pipe().atomic().get(text(7)).hget("job:map:flight", "to").lrange("job:list:alerts", 0, 0).query::<(String, String, Vec<String>)>(own));
}

/// What a client notices when a state changes: a watched key, a notification.
fn changes(client: &Client, own: &mut Connection) {
    ask("put job:text:watched 1");
    let mut tries = 0;
    let found: RedisResult<(String,)> = redis::transaction(own, &["job:text:watched"], |own, pipeline| {
        tries += 1;
        if tries == 1 {
            ask("put job:text:watched 2");
        }
        pipeline.get("job:text:watched").query(own)
    });
    step("WATCH", found.map(|found| (tries, found)));
    let mut listening = client.get_connection().unwrap();
    let mut messages = listening.as_pubsub();
    messages.set_read_timeout(Some(WAIT_MAX)).unwrap();
    messages.subscribe("__keyspace@0__:job:text:live").unwrap();
    ask("put job:text:live 1");
    step("a notification", messages.get_message().and_then(|each| each.get_payload::<String>().map_err(Into::into)));
    ask("delete job:text:live");
    step("another", messages.get_message().and_then(|each| each.get_payload::<String>().map_err(Into::into)));
}

async fn tokio_reads(client: &Client) {
    let own = client.get_multiplexed_async_connection().await.unwrap();
    let tasks: Vec<_> = all_texts()
        .into_iter()
        .map(|key| {
            let mut own = own.clone();
            tokio::spawn(async move { own.get::<_, String>(key).await })
        })
        .collect();
    let mut right = 0;
    for (number, task) in tasks.into_iter().enumerate() {
        right += (task.await.unwrap().ok() == Some(number.to_string())) as usize;
    }
    step("right values of tasks over one connection", Ok::<_, String>(right));
    let mut own = own;
    step("MULTI of tokio", pipe().atomic().get(text(7)).strlen(text(7)).query_async::<(String, i64)>(&mut own).await);
}

fn writes(client: &Client, own: &mut Connection) {
    step("SET, GET", own.set::<_, _, String>("own:text", "a").and_then(|_| own.get::<_, String>("own:text")));
    step("SETNX", own.set_nx::<_, _, bool>("own:text", "b"));
    step("HINCRBY", own.hincr::<_, _, _, i64>("own:map", "n", 5));
    step("RPUSH", own.rpush::<_, _, i64>("own:list", &["a", "b"]));
    step("BLPOP", own.blpop::<_, (String, String)>("own:list", 1.0));
    step("ZADD", own.zadd::<_, _, _, i64>("own:ranks", "a", 1.5));
    step("keys of both", own.mget::<_, Vec<Option<String>>>(&["own:text", "job:text:007", "none"]));
    step("MULTI of both", pipe().atomic().incr("own:counter", 1).get(text(7)).set("own:text", "b").query::<Value>(own));
    let script = Script::new("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])");
    step("a script", script.key("own:text").arg("d").invoke::<String>(own));
    step("XADD", own.xadd::<_, _, _, _, String>("own:stream", "1-1", &[("f", "v")]));
    step("XLEN", own.xlen::<_, usize>("own:stream"));
    let mut listening = client.get_connection().unwrap();
    let mut messages = listening.as_pubsub();
    messages.set_read_timeout(Some(WAIT_MAX)).unwrap();
    messages.subscribe("own:channel").unwrap();
    step("PUBLISH", own.publish::<_, _, i64>("own:channel", "hello"));
    step("a message", messages.get_message().and_then(|each| each.get_payload::<String>().map_err(Into::into)));
    step("DEL", own.del::<_, i64>(&["own:text", "own:map", "own:list", "own:ranks", "own:counter", "own:stream"]));
}

fn cluster() {
    // By default a request that fails is tried again after pauses that double up to 11 minutes.
    let client = ClusterClient::builder(vec![url()]).min_retry_wait(10).max_retry_wait(100).build().unwrap();
    let mut own = client.get_connection().unwrap();
    step("MGET of all slots", own.mget::<_, Vec<String>>(&all_texts()));
    let mut pipeline = cluster_pipe();
    all_texts().iter().for_each(|key| {
        pipeline.get(key);
    });
    step("a pipeline", pipeline.query::<Vec<String>>(&mut own));
    step("a map", own.hgetall::<_, BTreeMap<String, String>>("job:map:flight"));
    let tokio = tokio::runtime::Runtime::new().unwrap();
    step("MGET of tokio", tokio.block_on(tokio_texts(&client)));
    let mut before = tokio.block_on(client.get_async_connection()).unwrap();
    refused_writes();

    // The synchronous connection does not look for new nodes after the end of one, so a program opens another.
    ask("kill job:text:007");
    let again = || client.get_connection().and_then(|mut new| new.mget::<_, Vec<String>>(&all_texts()));
    step("after a server's end", until(again, |found| found.len() == TEXTS));
    step("the connection of before", own.get::<_, String>(text(7)));
    step("the same of tokio", until(|| tokio.block_on(tokio_texts(&client)), |found| found.len() == TEXTS));
    step("tokio's connection of before", tokio.block_on(async { timeout(WAIT_MAX, before.get::<_, String>(text(7))).await }));
    ask("put job:text:live 2");
    let live = || client.get_connection().and_then(|mut new| new.get::<_, String>("job:text:live"));
    step("a new value after it", until(live, |found| found == "2"));
}

/// Read all texts by a connection of tokio's client.
async fn tokio_texts(client: &ClusterClient) -> RedisResult<Vec<String>> {
    client.get_async_connection().await?.mget(all_texts()).await
}

/// Writes of one's own key, which only state servers refuse: the client takes their error for a failover.
fn refused_writes() {
    let builder = || ClusterClient::builder(vec![url()]);
    let written = |client: RedisResult<ClusterClient>| client.and_then(|each| each.get_connection()).and_then(|mut own| own.set::<_, _, ()>("own:text", "x"));
    step("a write without tries again", written(builder().retries(0).build()));
    step("a write with short pauses", written(builder().min_retry_wait(10).max_retry_wait(100).build()));
    let mut own = builder().build().unwrap().get_connection().unwrap();
    let (sender, receiver) = channel();
    spawn(move || sender.send(own.set::<_, _, ()>("own:text", "x").is_ok()));
    step("a write, within 70 s", receiver.recv_timeout(Duration::from_secs(70)));
}
